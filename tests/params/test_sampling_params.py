"""SamplingParams: every range of the rules, all faults at once, aliases, and that an instance stays as it was made."""

import dataclasses
import fractions

import numpy as np
import pytest

from klero import ParameterError, SamplingParams
from klero.params import Vector
from klero.params.aliases import ALIASES, NEAREST, RESERVED

NAN, INF = float("nan"), float("inf")
NOT_NUMBERS = ["1", "", b"1", [1], (), {}, len, 1j, np.array([1.0, 2.0])]
NOT_REAL = [*NOT_NUMBERS, True, False, np.True_, NAN, INF, -INF, np.float32(NAN), np.float64(INF), 10**400]
NOT_INTEGERS = [*NOT_NUMBERS, True, False, np.True_, NAN, INF, 1.0, 1.5, np.float64(2), fractions.Fraction(3, 2)]
NOT_BOOLEANS = [0, 1, "true", "", 1.0, NAN, [], np.int8(1), np.array([True])]
BELOW_0, BELOW_1, ABOVE_1 = -5e-324, float(np.nextafter(1.0, 0)), float(np.nextafter(1.0, 2))

TAGS = {"structures": [{"begin": "ab", "schema": {}, "end": "c"}], "triggers": ["a"]}
TAGS_TEXT = '{"structures":[{"begin":"ab","schema":{},"end":"c"}],"triggers":["a"]}'
GOOD = {
    "temperature": [(0, 0.0), (5e-324, 5e-324), (1, 1.0), (1e6, 1e6), (np.float32(0.5), 0.5), (np.int64(2), 2.0)],
    "top_k": [(-1, -1), (0, 0), (1, 1), (10**9, 10**9), (2**70, 2**70), (np.int32(7), 7), (np.uint8(3), 3)],
    "top_p": [(0, 0.0), (1, 1.0), (1e-300, 1e-300), (np.float32(0.25), 0.25), (fractions.Fraction(1, 2), 0.5)],
    "min_p": [(0, 0.0), (1, 1.0), (0.05, 0.05), (1e-300, 1e-300), (np.float16(0.5), 0.5)],
    "seed": [(0, 0), (2**64 - 1, 2**64 - 1), (-(2**63), -(2**63)), (-1, -1), (np.uint64(2**64 - 1), 2**64 - 1)],
    "n": [(1, 1), (1000, 1000), (np.int64(2), 2)],
    "max_tokens": [(1, 1), (10**9, 10**9), (np.int64(5), 5)],  # 0: test_together.py
    "min_tokens": [(0, 0), (10**9, 10**9)],
    "stop": [((), ()), ([], ()), ("a", ("a",)), (["a", "\n"], ("a", "\n")), (("b", "b", "a"), ("b", "a"))],
    "stop_token_ids": [
        ([], ()),
        ([0, 5], ((0,), (5,))),
        ([[1, 2], 3], ((1, 2), (3,))),
        ([3, [3], (3,)], ((3,),)),
        (np.array([4, 6]), ((4,), (6,))),
        ([np.array([1, 2])], ((1, 2),)),
    ],
    "end_token_ids": [([], ()), (7, (7,)), ([7, 8], (7, 8)), (np.int64(9), (9,)), ({5}, (5,))],
    "truncate_prompt_tokens": [(1, 1), (10**6, 10**6)],
    "top_p_decay": [(5e-324, 5e-324), (1, 1.0), (0.5, 0.5)],
    "top_n_sigma": [(-1, -1.0), (0, 0.0), (1.5, 1.5), (1e6, 1e6), (np.float32(2), 2.0)],
    "epsilon_cutoff": [(0, 0.0), (3e-4, 3e-4), (BELOW_1, BELOW_1)],
    "eta_cutoff": [(0, 0.0), (3e-4, 3e-4), (BELOW_1, BELOW_1)],
    "top_a": [(0, 0.0), (0.2, 0.2), (1, 1.0)],
    "typical_p": [(5e-324, 5e-324), (0.9, 0.9), (1, 1.0)],
    "xtc_probability": [(0, 0.0), (0.5, 0.5), (1, 1.0)],
    "xtc_threshold": [(0, 0.0), (0.1, 0.1), (0.7, 0.7), (1, 1.0)],
    "filters": [((), ()), ([], ()), (len, (len,)), ([len, max, len], (len, max, len))],
    "logits_processors": [((), ()), (len, (len,)), ([len, max], (len, max))],
    "logit_bias": [
        ({}, ()),
        ({7: 1, "5": 101, "0": -INF}, ((0, -INF), (5, 101.0), (7, 1.0))),
        ({np.int64(3): np.float32(0.5)}, ((3, 0.5),)),
        ({"007": 1}, ((7, 1.0),)),
        ([(3, 1), (1, -2)], ((1, -2.0), (3, 1.0))),
        ({1: 3.4e38, 2: -3.4e38}, ((1, 3.4e38), (2, -3.4e38))),
    ],
    "embedding_bias": [
        ([0, 1.5, -INF], Vector([0, 1.5, -INF])),
        (np.arange(5), Vector([0, 1, 2, 3, 4])),
        (np.float64([0.1]), Vector([0.1])),
        (Vector([1]), Vector([1])),
    ],
    "repetition_penalty": [(5e-324, 5e-324), (0.5, 0.5), (1, 1.0), (1.2, 1.2), (1e6, 1e6)],
    "presence_penalty": [(-2, -2.0), (0, 0.0), (2, 2.0)],
    "frequency_penalty": [(-2, -2.0), (0.25, 0.25), (2, 2.0)],
    "prompt_ignore_length": [(0, 0), (3, 3), (10**9, 10**9)],
    "bad_words": [((), ()), ("a", ("a",)), (["b", "a", "b"], ("b", "a"))],
    "bad_token_ids": [([], ()), ([5, [5], [1, 2]], ((5,), (1, 2))), (np.array([3]), ((3,),))],
    "no_repeat_ngram_size": [(0, 0), (1, 1), (3, 3)],
    "allowed_token_ids": [([7, 5, 7], (5, 7)), ({1}, (1,)), (np.array([2, 1]), (1, 2))],
    "logprobs": [(-1, -1), (0, 0), (1, 1), (10**9, 10**9), (np.int64(5), 5)],
    "prompt_logprobs": [(-1, -1), (0, 0), (1, 1), (10**9, 10**9), (np.int32(5), 5)],
    "logprob_token_ids": [([], ()), ([7, 5, 7], (7, 5)), ((0,), (0,)), (np.array([2, 1]), (2, 1))],
    "json": [({"b": 1, "a": 2}, '{"b":1,"a":2}'), ('{ "a": [] }', '{"a":[]}'), (True, "true"), ({}, "{}")],  # more:
    "regex": [("a+", "a+"), (np.str_("a"), "a")],  # test_guided.py
    "choice": [(["b", "a"], ("b", "a")), (("b",), ("b",)), (np.array(["a", "b"]), ("a", "b"))],
    "grammar": [('root ::= "a"', 'root ::= "a"')],
    "structural_tag": [(TAGS, TAGS_TEXT), (TAGS_TEXT, TAGS_TEXT)],
    "thinking_token_budget": [(0, 0), (10**9, 10**9), (np.int64(5), 5)],
}
BAD = {
    "temperature": [*NOT_REAL, -1e-9, BELOW_0, np.nextafter(1e6, INF), 1e7, -1],
    "top_k": [*NOT_INTEGERS, -2, -(10**9)],
    "top_p": [*NOT_REAL, BELOW_0, ABOVE_1, 2, -1, 90],
    "min_p": [*NOT_REAL, BELOW_0, ABOVE_1, 2, -1],
    "seed": [*NOT_INTEGERS, 2**64, -(2**63) - 1, 10**30],
    "n": [*NOT_INTEGERS, 0, -1],
    "max_tokens": [*NOT_INTEGERS, 0, -1],
    "min_tokens": [*NOT_INTEGERS, -1],
    "stop": ["", [""], ["a", ""], 5, b"a", [b"a"], [1], [None], {"a": 1}, NAN, True, [["a"]]],
    "stop_token_ids": [5, "5", ["5"], [-1], [[]], [[1, -1]], [1.0], [NAN], [True], [[True]], [None], {1: 2}, [[[1]]]],
    "end_token_ids": [-1, "5", ["5"], [-1], [[1]], 1.0, NAN, True, [False], {1: 2}],
    "truncate_prompt_tokens": [*NOT_INTEGERS, 0, -1],
    "top_p_decay": [*NOT_REAL, 0, -0.0, -0.5, ABOVE_1],
    "top_n_sigma": [*NOT_REAL, BELOW_0, -0.5, -2, 1e6 + 1],
    "epsilon_cutoff": [*NOT_REAL, BELOW_0, -1, 1, 2],
    "eta_cutoff": [*NOT_REAL, BELOW_0, -1, 1, 2],
    "top_a": [*NOT_REAL, BELOW_0, -1, ABOVE_1],
    "typical_p": [*NOT_REAL, 0, -1, ABOVE_1],
    "xtc_probability": [*NOT_REAL, BELOW_0, -1, ABOVE_1],
    "xtc_threshold": [*NOT_REAL, BELOW_0, -1, ABOVE_1],
    "filters": [1, "len", ["len"], [len, 1], {"f": len}, True, [None]],
    "logits_processors": [1, "len", ["len"], [len, 1], {"f": len}, True, [None]],
    "logit_bias": [
        {"abc": 1}, {"-1": 5}, {-1: 5}, {1.0: 5}, {True: 5}, {"1.0": 5}, {" 1": 5}, {"1_0": 5}, {"": 1}, {None: 1},
        {5: NAN}, {5: INF}, {5: True}, {5: "1"}, {5: None}, {5: 1e39}, {5: -1e39}, {5: 10**400},
        {"5": 1, 5: 1}, {"5": 1, "05": 1}, [(5, 1), (5, 2)], [5], [(5,)], [(5, 1, 2)], "5", 5, True, ["51"],
    ],
    "embedding_bias": [
        [], [[1.0]], 1.0, "1", b"1", [NAN], [INF], [1, INF], [1e39], [-1e39], [True, False], [1.0, True], ["1"], [None],
        [1, [2]], {0: 1.0}, {1.0}, [1j], np.array([True]), np.zeros((2, 2)), np.array(["a"]), np.array([NAN]),
    ],
    "repetition_penalty": [*NOT_REAL, 0, -1, 1e6 + 1],
    "presence_penalty": [*NOT_REAL, -2.1, 2.1],
    "frequency_penalty": [*NOT_REAL, -2.1, 2.1],
    "prompt_ignore_length": [*NOT_INTEGERS, -1],
    "bad_words": ["", [""], ["a", ""], 5, [5], {"a": 1}, [["a"]], True, [None]],
    "bad_token_ids": [5, "5", ["5"], [-1], [[]], [[1, -1]], [1.0], [True], [None], {1: 2}],
    "no_repeat_ngram_size": [*NOT_INTEGERS, -1],
    "allowed_token_ids": [[], (), 5, "5", ["5"], [-1], [[1]], [1.0], [True], [None], {1: 2}],
    "logprobs": [*NOT_INTEGERS, -2, -(10**9)],
    "prompt_logprobs": [*NOT_INTEGERS, -2, -(10**9)],
    "logprob_token_ids": [5, "5", ["5"], [-1], [[1]], [1.0], [True], [None], {1: 2}],
    "json": ["", "x", "[1]", "1", b"{}", 1, 1.0, [], ["a"], NAN, len, {1: 2}, {"a": NAN}, {"a": {1}}, '{"a":1,"a":2}'],
    "regex": ["", b"a", 1, ["a"], {"a": 1}, True, NAN, "\ud800"],
    "choice": ["a", "", [], [""], ["a", "a"], [1], [None], [["a"]], {"a": 1}, 1, True, ["\ud800"]],
    "grammar": ["", b"a", 1, ["a"], {"a": 1}, True, NAN, "\ud800"],
    "structural_tag": ["", "{}", {}, [], 1, True, {"triggers": ["a"]}, TAGS | {"more": 1}, TAGS | {"triggers": ["b"]}],
    "thinking_token_budget": [*NOT_INTEGERS, -1],
}  # fmt: skip
BESIDE = {  # fields that mean something beside another one only: (what stands beside them, good, bad)
    "top_p_min": ({"top_p_decay": 0.5}, [(5e-324, 5e-324), (0.3, 0.3), (1, 1.0)], [*NOT_REAL, 0, -1, ABOVE_1]),
    "top_p_reset_id": ({"top_p_decay": 0.5}, [(0, 0), (np.int64(9), 9)], [*NOT_INTEGERS, -1]),
    "json_whitespace": ({"json_object": True}, [(0, 0), (16, 16), (np.int8(3), 3)], [*NOT_INTEGERS, -1, 17]),
    "logprobs_mode": (
        {"logprobs": 0},
        [("raw", "raw"), ("processed", "processed"), (np.str_("processed"), "processed")],
        ["", "RAW", "raw_logprobs", b"raw", ["raw"], {"raw"}, 0, 1, True, NAN, len],
    ),
}
SWITCHES = {
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "echo": False,
    "return_kept": False,
    "return_probs": False,
    "return_context_logits": False,
    "return_generation_logits": False,
    "json_object": False,
}
UNSET = {
    "temperature": None, "top_k": None, "top_p": None, "min_p": None, "seed": None, "n": 1, "max_tokens": None,
    "min_tokens": 0, "stop": (), "stop_token_ids": (), "end_token_ids": (), "truncate_prompt_tokens": None, **SWITCHES,
    "top_p_decay": None, "top_p_min": None, "top_p_reset_id": None, "top_n_sigma": None, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_a": 0.0, "typical_p": 1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "filters": (),
    "logit_bias": (), "embedding_bias": None, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "prompt_ignore_length": None, "bad_words": (), "bad_token_ids": (),
    "no_repeat_ngram_size": 0, "allowed_token_ids": None, "logits_processors": (), "logprobs": None,
    "prompt_logprobs": None, "logprobs_mode": "raw", "logprob_token_ids": (), "json": None, "regex": None,
    "choice": None, "grammar": None, "structural_tag": None, "json_whitespace": 0, "thinking_token_budget": None,
}  # fmt: skip


def cases(table):
    return [pytest.param(field, value, id=f"{field} {value!r}"[:50]) for field in table for value in table[field]]


def test_the_tables_name_every_field():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == set(UNSET)
    assert fields == {*GOOD, *BESIDE, *SWITCHES} == {*BAD, *BESIDE, *SWITCHES}


@pytest.mark.parametrize("field", BESIDE)
def test_fields_beside_another(field):
    beside, good, bad = BESIDE[field]
    for given, right in good:
        taken = getattr(SamplingParams(**beside, **{field: given}), field)
        assert taken == right
        assert type(taken) is type(right)
    for value in bad:
        with pytest.raises(ParameterError) as caught:
            SamplingParams(**beside, **{field: value})
        assert [fault.field for fault in caught.value.faults] == [field]


@pytest.mark.parametrize("field, value", cases(GOOD))
def test_good_values_are_taken_and_normalised(field, value):
    given, right = value
    taken = getattr(SamplingParams(**{field: given}), field)
    assert taken == right
    assert type(taken) is type(right)


@pytest.mark.parametrize("field, value", cases(BAD | dict.fromkeys(SWITCHES, NOT_BOOLEANS)))
def test_bad_values_are_one_fault_that_names_field_value_and_rule(field, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    (fault,) = caught.value.faults
    assert fault.field == caught.value.field == field
    assert fault.value is value
    assert fault.rule.startswith("must be ")
    assert str(caught.value) == str(fault)
    assert str(fault).startswith(f"{field}=")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("field", SWITCHES)
def test_switches(field):
    for on, off in ((True, False), (np.True_, np.False_)):
        assert getattr(SamplingParams(**{field: on}), field) is True
        assert getattr(SamplingParams(**{field: off}), field) is False


@pytest.mark.parametrize("field", UNSET)
def test_none_means_not_asked(field):
    assert getattr(SamplingParams(), field) == UNSET[field]
    assert SamplingParams(**{field: None}) == SamplingParams()


def test_all_faults_are_reported_together():
    with pytest.raises(ParameterError) as caught:
        SamplingParams(
            temperature=-1, top_p=NAN, top_k=True, seed="7", stop=[""], tempature=1, n_predict=0, max_tokens=5,
            logit_bias={"a": 1}, repeat_penalty=0, allowed_token_ids=[], filters=1, top_a=2, top_p_min=0.5,
            logprobs=True, beam_width=2,
        )  # fmt: skip
    faults = {fault.field for fault in caught.value.faults}
    assert faults == {
        "temperature", "top_p", "top_k", "seed", "stop", "tempature", "max_tokens", "logit_bias", "repetition_penalty",
        "allowed_token_ids", "filters", "top_a", "top_p_min", "logprobs", "beam_width",
    }  # fmt: skip
    for field in faults:
        assert f"{field}=" in str(caught.value)


def test_unknown_fields_are_faults_that_suggest_the_near_one():
    with pytest.raises(ParameterError, match=r"temprature=1: .*did you mean temperature\?"):
        SamplingParams(temprature=1)
    with pytest.raises(ParameterError, match=r"max_new_token=.*max_new_tokens"):
        SamplingParams(max_new_token=1)
    for name, field in NEAREST.items():
        with pytest.raises(ParameterError, match=rf"{name}=1: is not a field .*; did you mean {field}\? docs/porting"):
            SamplingParams(**{name: 1})
    with pytest.raises(ParameterError) as caught:
        SamplingParams(zzqx=1)
    assert "did you mean" not in str(caught.value)


def test_fields_of_later_versions_are_unknown_until_they_work():
    for field in ("use_beam_search", "length_penalty", "beam_width", "early_stopping"):
        with pytest.raises(ParameterError, match=f"{field}=1: is not supported yet"):
            SamplingParams(**{field: 1})
    assert RESERVED.isdisjoint(UNSET)
    assert RESERVED.isdisjoint(ALIASES)


EXAMPLES = {
    "max_tokens": 9, "min_tokens": 3, "n": 2, "seed": 8, "temperature": 0.5, "stop": ("x",), "end_token_ids": (4,),
    "include_stop_str_in_output": True, "repetition_penalty": 1.5, "bad_words": ("x",), "bad_token_ids": ((1,), (2, 3)),
    "logits_processors": (len,), "top_p_reset_id": 9, "top_n_sigma": 1.5, "typical_p": 0.5,
    "logprobs": 3, "logprob_token_ids": (7, 2), "json": '{"type":"object"}', "json_object": True, "regex": "a+",
    "choice": ("x", "y"), "grammar": 'root ::= "a"', "thinking_token_budget": 4,
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias):
    field = ALIASES[alias]
    value, beside = EXAMPLES[field], BESIDE.get(field, ({},))[0]
    right = SamplingParams(**beside, **{field: value})
    assert getattr(right, field) == value
    assert SamplingParams(**beside, **{alias: value}) == right
    assert SamplingParams.from_dict({**beside, alias: value}) == right
    with pytest.raises(ParameterError, match=f"{field}=.*stands beside {alias}"):
        SamplingParams(**{alias: value, field: value})
    with pytest.raises(ParameterError, match=f"{alias}=.*stands beside {field}"):
        SamplingParams(**{field: value, alias: value})


def test_an_alias_is_checked_like_its_field():
    with pytest.raises(ParameterError) as caught:
        SamplingParams(max_new_tokens=-1)
    assert caught.value.field == "max_tokens"


def test_fields_are_keywords_only():
    with pytest.raises(TypeError):
        SamplingParams(1.0)


def test_but_changes_some_fields_and_checks_them_alone():
    whole = SamplingParams(logit_bias={3: 1.5}, seed=7, max_tokens=9, min_tokens=2)
    assert whole.row.greedy  # what was worked out of it does not go along
    made = whole.but(seed=8, temperature=0.5)
    assert made == SamplingParams(logit_bias={3: 1.5}, seed=8, temperature=0.5, max_tokens=9, min_tokens=2)
    assert not made.row.greedy
    assert whole == SamplingParams(logit_bias={3: 1.5}, seed=7, max_tokens=9, min_tokens=2)


def test_but_tells_what_a_change_breaks():
    whole = SamplingParams(max_tokens=9, min_tokens=2)
    with pytest.raises(ParameterError, match=r"seed='x'.*must"):
        whole.but(seed="x")
    with pytest.raises(ParameterError, match=r"min_tokens=2: must not be above max_tokens=1"):
        whole.but(max_tokens=1)
    with pytest.raises(ParameterError, match="temp=1: is not a field"):
        whole.but(temp=1)
