"""Cases from the field, kind prompt_logprobs, at the level of the library."""

from __future__ import annotations

import numpy as np
import pytest

from klero import SamplingParams
from klero.engine import LLM
from klero.testing.models import PagedToyModel, ToyModel


class Table(ToyModel):
    """Says row i of a table after the token at position i; no row is asked for beyond it."""

    def __init__(self, rows):
        super().__init__(vocab_size=len(rows[0]), max_model_len=16)
        self.table = np.array(rows, np.float32)

    def forward(self, step):
        return self.table[step.positions[step.logits_rows]]


def test_PL_01_a_prompt_is_scored_without_generating():
    llm = LLM(Table([[0, 2, 1, 0], [1, 0, 3, 0], [0, 0, 0, 5]]))
    (output,) = llm.generate([[3, 1, 2]], SamplingParams(max_tokens=0, prompt_logprobs=1))
    said, (choice,) = output.prompt_logprobs, output.outputs
    assert len(said) == 3
    assert np.isnan(said.sampled[0])
    assert said.sampled[1:].tolist() == pytest.approx([-0.493812, -0.210998], abs=2e-6)
    assert (choice.token_ids, choice.finish_reason) == ((), "length")


def test_PL_01_with_tokens_there_are_entries_for_both():
    llm = LLM(Table([[0, 2, 1, 0], [1, 0, 3, 0], [0, 0, 0, 5], [0, 9, 0, 0]]))
    (output,) = llm.generate([[3, 1, 2]], SamplingParams(max_tokens=2, prompt_logprobs=1, logprobs=1))
    (choice,) = output.outputs
    assert choice.token_ids == (3, 1)
    assert (len(output.prompt_logprobs), len(choice.logprobs)) == (3, 2)
    assert choice.logprobs.sampled[0] == pytest.approx(-0.020012, abs=2e-6)


@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("together", [True, False])
def test_PL_03_a_prefix_that_another_request_had_is_scored_anew(order, together):
    prompts = {"A": [1, 2, 3, 4, 5, 6, 7, 8, 9], "B": [1, 2, 3, 4, 5, 6, 7, 8, 10]}
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    cold = {
        name: LLM(PagedToyModel(), block_size=4).generate([prompt], params)[0].prompt_logprobs.sampled.tolist()
        for name, prompt in prompts.items()
    }
    llm, asked = LLM(PagedToyModel(), block_size=4, num_blocks=16), [prompts[name] for name in order]
    outputs = llm.generate(asked, params) if together else [llm.generate([one], params)[0] for one in asked]
    for name, output in zip(order, outputs, strict=True):
        assert len(output.prompt_logprobs) == 9
        assert output.prompt_logprobs.sampled[1:].tolist() == cold[name][1:]
    assert cold["A"][1:-1] == cold["B"][1:-1]
    assert cold["A"][-1] != cold["B"][-1]


def test_PL_04_nothing_is_said_of_the_first_token_and_the_ids_come_back():
    (output,) = LLM(ToyModel()).generate([[7, 4, 4]], SamplingParams(max_tokens=0, prompt_logprobs=1))
    said = output.prompt_logprobs
    assert said[0] == {}
    assert [4 in said[1], 4 in said[2]] == [True, True]
    assert output.prompt_token_ids == (7, 4, 4)
    assert len(output.prompt_token_ids) == len(said)
