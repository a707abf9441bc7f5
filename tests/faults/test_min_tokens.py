"""Cases from the field, kind min_tokens: what may end a sequence before it has its least length."""

import numpy as np
import pytest
from tests.faults.rows import BACKENDS

from klero import sample
from klero.engine import LLM
from klero.finish import Finish, Finished, FinishReason, TokenBytes
from klero.params import SamplingParams
from klero.testing.models import ToyModel


def test_BN_09_a_stop_string_before_min_tokens_is_text_and_never_fires_later():
    vocabulary = TokenBytes.from_list([b"a", b"\n", b"b", b"c", b"d", b"e"])
    params = SamplingParams(stop="\n", min_tokens=4, max_tokens=7)
    finish = Finish(params, end_token_ids=(), vocabulary=vocabulary, max_tokens=7)
    assert finish.push_all([0, 1, 2, 3, 4, 1, 5]) == 6
    assert finish.finished == Finished(FinishReason.STOP, "\n")
    assert finish.text == "a\nbcd"


@pytest.mark.parametrize("ignore_eos, tokens", [(False, (4, 4, 4, 2)), (True, (2, 2, 2, 2, 2))])
def test_BN_07_min_tokens_counts_generated_tokens_alone(ignore_eos, tokens):
    """A long prompt changes nothing. With ignore_eos no end id is left to ban: 2 is a token like any other."""

    class Model(ToyModel):
        def forward(self, step):
            return np.tile(np.array([0, 1, 9, 0, 8], np.float32), (len(step.logits_rows), 1))

    model = Model(vocab_size=5, max_model_len=2048, end_token_ids=[2])
    params = SamplingParams(min_tokens=3, max_tokens=5, ignore_eos=ignore_eos)
    (output,) = LLM(model).generate([[1] * 1024], params)
    assert output.outputs[0].token_ids == tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_BN_07_on_rows_alone(backend):
    """Three tokens are out: the end is free. With ignore_eos it never was banned; 4, the last id, never is."""
    rows, prompts = np.tile(np.float32([0, 1, 9, 0, 8]), (4, 1)), [[1] * 1024] * 4
    told = {"prompts": prompts, "outputs": [[4] * k for k in range(4)], "end_token_ids": [2], "backend": backend}
    assert sample(rows, SamplingParams(min_tokens=3), **told).token_ids.tolist() == [4, 4, 4, 2]
    assert sample(rows, SamplingParams(min_tokens=3, ignore_eos=True), **told).token_ids.tolist() == [2] * 4
    rows[:, 4] = 10
    assert sample(rows, SamplingParams(min_tokens=3, ignore_eos=True), **told).token_ids.tolist() == [4] * 4
