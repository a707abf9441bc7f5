"""Every two features at once: the kernel draws what the reference draws. A table, so that no pair is left to luck."""


import numpy as np
import pytest

from klero import SamplingParams, sample
from klero.device import HAVE_NUMBA
from klero.rewrite.bans import bitmask

pytestmark = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")

V = 300  # two blocks of the kernels
FEATURES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.02},
    "top_p_decay": {"top_p_decay": 0.9, "top_p_reset_id": 3},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.003},
    "eta_cutoff": {"eta_cutoff": 0.01},
    "top_a": {"top_a": 0.1},
    "typical_p": {"typical_p": 0.7},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.02},
    "filters": {"filters": lambda row: max(1, len(row) * 2 // 3)},
    "logit_bias": {"logit_bias": {3: 4.0, 260: -np.inf, 7: -1.0}},
    "embedding_bias": {"embedding_bias": np.linspace(-1, 1, V)},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": -1.8},
    "frequency_penalty": {"frequency_penalty": -0.4, "prompt_ignore_length": 1},
    "bad_token_ids": {"bad_token_ids": [4, (7, 3), (9, 9, 7)]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "allowed_token_ids": {"allowed_token_ids": range(0, V, 3)},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [(7, 8)]},
    "logits_processors": {"logits_processors": lambda token_ids, row: row * 0.5},
    "masks": {},
}
PROMPT, OUTPUT, ENDS = [7, 3, 9, 9], [7, 3, 260, 7], [299, 12]
ROWS = (np.random.default_rng(0).standard_normal((6, V)) * 2).astype(np.float32)
HALF = np.ascontiguousarray((ROWS.view(np.uint32) >> 16).astype(np.uint16))


def draw(pair, rows, backend):
    params = SamplingParams(**{name: value for feature in pair for name, value in FEATURES[feature].items()})
    many = len(rows)
    return sample(
        rows, params, prompts=[PROMPT] * many, outputs=[OUTPUT] * many, end_token_ids=ENDS, seeds=np.arange(many),
        masks=np.tile(bitmask(range(0, V, 2), V), (many, 1)) if "masks" in pair else None, backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_every_pair_with(feature):
    for other in FEATURES:
        pair = (other, feature)
        for rows in (ROWS, HALF):
            fast, right = draw(pair, rows, "cpu"), draw(pair, rows, "reference")
            assert fast.token_ids.tolist() == right.token_ids.tolist(), pair
            assert fast.num_kept.tolist() == right.num_kept.tolist(), pair
            assert (fast.messages, right.messages) == ({}, {}), pair


def test_every_feature_acts():
    """Each feature alone changes what is kept or drawn on some row; one that did nothing would pass above."""
    rows, many = np.tile(ROWS, (50, 1)), 300
    told = {"prompts": [PROMPT] * many, "outputs": [OUTPUT] * many, "end_token_ids": ENDS, "seeds": np.arange(many)}
    plain = sample(rows, SamplingParams(temperature=1.0), **told)
    for feature, fields in FEATURES.items():
        masks = np.tile(bitmask(range(0, V, 2), V), (many, 1)) if feature == "masks" else None
        found = sample(rows, SamplingParams(**({"temperature": 1.0} | fields)), masks=masks, **told)
        same = found.token_ids.tolist() == plain.token_ids.tolist()
        assert not (same and found.num_kept.tolist() == plain.num_kept.tolist()), feature


def test_the_table_has_every_field_that_decides_a_token():
    import dataclasses

    told = {name for fields in FEATURES.values() for name in fields} | {"top_p_min", "bad_words", "end_token_ids"}
    text = "seed n max_tokens stop ignore_eos include_stop_str_in_output detokenize skip_special_tokens"
    text += " spaces_between_special_tokens echo truncate_prompt_tokens"
    text += " json json_object regex choice grammar structural_tag json_whitespace thinking_token_budget"  # need a mask
    said = "logprobs prompt_logprobs logprobs_mode logprob_token_ids return_kept return_probs"
    said += " return_context_logits return_generation_logits"
    assert {field.name for field in dataclasses.fields(SamplingParams)} == told | {*text.split(), *said.split()}
