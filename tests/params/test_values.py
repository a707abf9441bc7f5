"""A SamplingParams stays as it was made: frozen, hashable, comparable, copied, pickled, replaced, shown."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from klero import ParameterError, SamplingParams
from klero.params import Vector

FULL = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=-3, stop="a", stop_token_ids=[1, [2, 3]])


class Unhashable:
    """A callable that compares by value and has no hash."""

    __hash__ = None

    def __eq__(self, other):
        return isinstance(other, Unhashable)

    def __call__(self, *args):
        return args[-1]

    def __repr__(self):
        return "Unhashable()"


EVERYTHING = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": -3, "n": 2, "max_tokens": 9, "min_tokens": 1,
    "stop": ["a"], "stop_token_ids": [1, [2, 3]], "end_token_ids": [4], "ignore_eos": True,
    "include_stop_str_in_output": True, "detokenize": False, "skip_special_tokens": False,
    "spaces_between_special_tokens": True, "echo": True, "truncate_prompt_tokens": 5, "top_p_decay": 0.5,
    "top_p_min": 0.3, "top_p_reset_id": 9, "top_n_sigma": 1.5, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_a": 0.1,
    "typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.2, "filters": [Unhashable()],
    "logit_bias": {"5": 1, 2: -9}, "embedding_bias": [0.5, -float("inf"), 1],
    "repetition_penalty": 1.2, "presence_penalty": 0.5,
    "frequency_penalty": 0.25, "prompt_ignore_length": 2, "bad_words": "b", "bad_token_ids": [[1, 2]],
    "no_repeat_ngram_size": 3, "allowed_token_ids": [5, 6], "logits_processors": [Unhashable()], "logprobs": 3,
    "prompt_logprobs": 0, "logprobs_mode": "processed", "logprob_token_ids": [8, 2], "return_kept": True,
    "return_probs": True, "return_context_logits": True, "return_generation_logits": True,
    "json": {"type": "object"}, "json_whitespace": 3, "thinking_token_budget": 7,
}  # fmt: skip
OTHER_GRAMMARS = {  # of six, one at a time
    "json_object": True, "regex": "a", "choice": ["a", "b"], "grammar": "root ::= x",
    "structural_tag": {"structures": [{"begin": "ab", "schema": True, "end": ""}], "triggers": ["a"]},
}  # fmt: skip


def with_grammar(field):
    """All fields at once, with the grammar that this one is."""
    given = {name: value for name, value in EVERYTHING.items() if name != "json"}
    if field in ("regex", "choice", "grammar"):
        del given["json_whitespace"]
    return given | {field: (EVERYTHING | OTHER_GRAMMARS)[field]}


def test_frozen():
    params = SamplingParams(temperature=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        del params.temperature


def test_equal_and_hashable():
    assert SamplingParams(top_k=5, stop=["a"]) == SamplingParams(stop=("a",), top_k=5)
    assert len({FULL, copy.deepcopy(FULL), SamplingParams(), SamplingParams()}) == 2


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol):
    others = [SamplingParams(**with_grammar(field)) for field in OTHER_GRAMMARS]
    for params in (FULL, SamplingParams(), SamplingParams(**EVERYTHING), *others):
        back = pickle.loads(pickle.dumps(params, protocol))
        assert back == params
        assert back.row == params.row
        assert repr(back) == repr(params)


def test_the_table_names_every_field():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(EVERYTHING) | set(OTHER_GRAMMARS)


@pytest.mark.parametrize("grammar", ["json", *OTHER_GRAMMARS])
def test_everything_set_at_once(grammar):
    given = with_grammar(grammar)
    params = SamplingParams(**given)
    assert set(params.asked()) == set(given)
    assert params == SamplingParams(**params.asked()) == copy.deepcopy(params) == SamplingParams.from_dict(given)
    assert hash(params) == hash(SamplingParams(**given))
    assert params.for_prompt(5) == dataclasses.replace(params, seed=2)
    assert params.for_prompt(0) is params


@pytest.mark.parametrize("field", EVERYTHING)
def test_each_field_counts_in_a_comparison(field):
    params = SamplingParams(**EVERYTHING)
    less = dict(EVERYTHING)
    del less[field]
    if field == "top_p_decay":
        del less["top_p_min"], less["top_p_reset_id"]
    if field == "json":
        del less["json_whitespace"]
    if field == "end_token_ids":
        del less["ignore_eos"]
    assert params != SamplingParams(**less)


def test_a_vector_is_a_value():
    given = np.array([0.1, -0.0, -np.inf])
    vector = Vector(given)
    given[0] = 9
    assert vector.array.tolist() == [float(np.float32(0.1)), 0.0, -np.inf]
    assert vector.array.dtype == np.float32
    assert vector == Vector([0.1, -0.0, -np.inf])
    assert hash(vector) == hash(Vector([0.1, -0.0, -np.inf]))
    assert vector != Vector([0.1, 0.0, -np.inf])  # other bits
    assert vector != Vector([0.1, -0.0])
    assert vector != (0.1, -0.0, -np.inf)
    assert repr(Vector([1, 2.5, -np.inf, 4])) == "Vector([1, 2.5, -inf, ...], width=4)"
    assert repr(Vector([1])) == "Vector([1], width=1)"
    for one in (vector, pickle.loads(pickle.dumps(vector)), copy.deepcopy(vector)):
        assert one == vector
        with pytest.raises(ValueError, match="read-only"):
            one.array[0] = 1
        with pytest.raises(AttributeError, match="does not change"):
            one.array = given


def test_replace_checks_again():
    changed = dataclasses.replace(FULL, temperature=2, seed=None)
    assert (changed.temperature, changed.seed, changed.top_k) == (2.0, None, 40)
    assert changed.row.reciprocal == 0.5
    assert FULL.temperature == 0.7
    with pytest.raises(ParameterError):
        dataclasses.replace(FULL, temperature=-1)


def test_repr_shows_what_was_asked_and_makes_it_again():
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=0, stop="a")) == "SamplingParams(temperature=0.0, stop=('a',))"
    assert eval(repr(FULL)) == FULL


def test_parameter_errors_survive_pickling():
    with pytest.raises(ParameterError) as caught:
        SamplingParams(temperature=-1, top_p=3)
    back = pickle.loads(pickle.dumps(caught.value))
    assert back.faults == caught.value.faults
    assert str(back) == str(caught.value)


def test_a_long_value_is_shortened_in_the_message():
    with pytest.raises(ParameterError) as caught:
        SamplingParams(temperature="x" * 10_000)
    assert len(str(caught.value)) < 300
