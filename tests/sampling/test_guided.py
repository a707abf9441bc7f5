"""Fields of structured output where no tokenizer is: accepted with a mask, refused without one, never ignored."""

import numpy as np
import pytest

from klero import ParameterError, SamplingParams, explain, sample
from klero.rewrite.bans import bitmask
from klero.sampling.contexts import read_masks

FIELDS = {
    "json": {}, "json_object": True, "regex": "a", "choice": ["a"], "grammar": "root ::= x",
    "structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["a"]},
    "thinking_token_budget": 0,
}  # fmt: skip
ROWS = np.float32([[0, 3, 1, 2], [3, 0, 1, 2]])
PLAIN = SamplingParams()


@pytest.mark.parametrize("field", FIELDS)
def test_without_a_mask_they_are_refused(field):
    params = SamplingParams(**{field: FIELDS[field]})
    words = f"^{field}=.*: is about text, and there is no tokenizer here; give %s=, or ask klero.LLM$"
    with pytest.raises(ParameterError, match=words % "masks"):
        sample(ROWS, [PLAIN, params], positions=0)
    with pytest.raises(ParameterError, match=words % "mask"):
        explain(ROWS[0], params, position=0)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_with_a_mask_they_are_the_mask(field, backend):
    params = SamplingParams(**{field: FIELDS[field]})
    masks = np.stack([bitmask([0, 2], 4), np.int32([-1])])
    assert sample(ROWS, [PLAIN, params], positions=0, masks=masks, backend=backend).token_ids.tolist() == [2, 0]
    assert explain(ROWS[1], params, position=0, mask=bitmask([2, 3], 4)).token == 3


def test_a_grammar_and_a_budget_are_two_faults():
    with pytest.raises(ParameterError) as caught:
        explain(ROWS[0], SamplingParams(regex="a", thinking_token_budget=3), position=0)
    assert [fault.field for fault in caught.value.faults] == ["regex", "thinking_token_budget"]


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_BN_10_on_rows_alone(backend):
    """The choice "yes" (5) is out and the grammar allows 2, the end, alone; where it may go on, min_tokens holds."""
    params = SamplingParams(choice=["yes"], min_tokens=8)
    rows = np.tile(np.float32([9, 0, 1, 0, 0, 3]), (3, 1))
    masks = np.stack([bitmask(ids, 6) for ids in ([5], [2], [2, 3])])
    told = {"prompts": [[4]] * 3, "outputs": [[], [5], [5]], "end_token_ids": [2], "masks": masks}
    assert sample(rows, params, backend=backend, **told).token_ids.tolist() == [5, 2, 3]


def test_explain_shows_the_mask():
    told = {"prompt": [4], "output": [5], "end_token_ids": [2]}
    params = SamplingParams(choice=["yes"], min_tokens=8)
    said = explain([9, 0, 1, 0, 0, 3], params, mask=bitmask([2, 3], 6), **told)
    assert [(stage.name, stage.tokens) for stage in said.stages] == [
        ("grammar and masks", 2), ("min_tokens", 1), ("logits", 1), ("greedy", 1),
    ]  # fmt: skip
    said = explain([9, 0, 1, 0, 0, 3], params, mask=bitmask([2], 6), **told)
    assert [stage.name for stage in said.stages] == ["grammar and masks", "logits", "greedy"]  # min_tokens yields
    said = explain([9, 0, -np.inf, 0, 0, 3], params, mask=bitmask([2], 6), **told)
    assert said.message == "no token is left for position 2 after the bans of grammar and masks: every logit is -inf"


def test_explain_speaks_of_its_own_arguments():
    with pytest.raises(ParameterError, match=r"^repetition_penalty=2\.0: reads the history; give prompt= and output= "):
        explain(ROWS[0], SamplingParams(repetition_penalty=2), position=0)
    with pytest.raises(ParameterError, match=r"^position=None: must be given, or prompt= and output=, from which it "):
        explain(ROWS[0], PLAIN)
    with pytest.raises(ParameterError, match=r"^positions=None: must be given, or prompts= and outputs=, from "):
        sample(ROWS, PLAIN)
    with pytest.raises(ParameterError, match=r"^prompt="):
        explain(ROWS[0], PLAIN, prompt=[9], output=[])
    with pytest.raises(ParameterError, match=r"^mask='float64 \(4,\)': must be int32 \[1\], bit i & 31"):
        explain(ROWS[0], PLAIN, position=0, mask=[1.0, 1.0, 0.0, 0.0])


def test_bits_past_the_last_token_allow_nothing():
    """Of 40 tokens the second word has 8 bits; a mask of ones alone masks nothing, and is left as it is."""
    given = np.int32([[0, -1], [-1, -1], [4, 3]])
    read = read_masks(given, 3, 40, 40)
    assert read.tolist() == [[0, 255], [-1, -1], [4, 3]]
    assert given.tolist() == [[0, -1], [-1, -1], [4, 3]]
    assert read_masks(given, 3, 64, 64) is not None
    assert read_masks(given, 3, 64, 64).tolist() == given.tolist()
    assert read_masks(np.int32([[0, -256]]), 1, 64, 40).tolist() == [[0, 0]]  # padding from 40 on
    params = SamplingParams(min_tokens=3)
    said = explain(np.zeros(40, np.float32), params, prompt=[], output=[], mask=np.int32([4, -256]), end_token_ids=[2])
    assert said.token == 2  # nothing but the end, though bits of columns 40 to 63 are 1
