"""SamplingParams: every range of the rules, all faults at once, aliases, and that an instance stays as it was made."""

import copy
import dataclasses
import fractions
import pickle

import numpy as np
import pytest

from klero import ParameterError, SamplingParams
from klero.params.aliases import ALIASES

NAN, INF = float("nan"), float("inf")
NOT_NUMBERS = ["1", "", b"1", [1], (), {}, len, 1j, np.array([1.0, 2.0])]
NOT_REAL = [*NOT_NUMBERS, True, False, np.True_, NAN, INF, -INF, np.float32(NAN), np.float64(INF), 10**400]
NOT_INTEGERS = [*NOT_NUMBERS, True, False, np.True_, NAN, INF, 1.0, 1.5, np.float64(2), fractions.Fraction(3, 2)]
NOT_BOOLEANS = [0, 1, "true", "", 1.0, NAN, [], np.True_]
BELOW_0, ABOVE_1 = -5e-324, float(np.nextafter(1.0, 2))

GOOD = {
    "temperature": [(0, 0.0), (5e-324, 5e-324), (1, 1.0), (1e6, 1e6), (np.float32(0.5), 0.5), (np.int64(2), 2.0)],
    "top_k": [(-1, -1), (0, 0), (1, 1), (10**9, 10**9), (2**70, 2**70), (np.int32(7), 7), (np.uint8(3), 3)],
    "top_p": [(0, 0.0), (1, 1.0), (1e-300, 1e-300), (np.float32(0.25), 0.25), (fractions.Fraction(1, 2), 0.5)],
    "min_p": [(0, 0.0), (1, 1.0), (0.05, 0.05), (1e-300, 1e-300), (np.float16(0.5), 0.5)],
    "seed": [(0, 0), (2**64 - 1, 2**64 - 1), (-(2**63), -(2**63)), (-1, -1), (np.uint64(2**64 - 1), 2**64 - 1)],
    "n": [(1, 1), (1000, 1000), (np.int64(2), 2)],
    "max_tokens": [(1, 1), (10**9, 10**9), (np.int64(5), 5)],
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
}
SWITCHES = {
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "echo": False,
}
UNSET = {
    "temperature": None, "top_k": None, "top_p": None, "min_p": None, "seed": None, "n": 1, "max_tokens": None,
    "min_tokens": 0, "stop": (), "stop_token_ids": (), "end_token_ids": (), "truncate_prompt_tokens": None, **SWITCHES,
}  # fmt: skip


def cases(table):
    return [pytest.param(field, value, id=f"{field} {value!r}"[:50]) for field in table for value in table[field]]


def test_the_tables_name_every_field():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == set(UNSET) == set(GOOD) | set(SWITCHES) == set(BAD) | set(SWITCHES)


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
    assert getattr(SamplingParams(**{field: True}), field) is True
    assert getattr(SamplingParams(**{field: False}), field) is False


@pytest.mark.parametrize("field", UNSET)
def test_none_means_not_asked(field):
    assert getattr(SamplingParams(), field) == UNSET[field]
    assert SamplingParams(**{field: None}) == SamplingParams()


def test_all_faults_are_reported_together():
    with pytest.raises(ParameterError) as caught:
        SamplingParams(
            temperature=-1, top_p=NAN, top_k=True, seed="7", stop=[""], tempature=1, n_predict=0, max_tokens=5
        )
    faults = {fault.field for fault in caught.value.faults}
    assert faults == {"temperature", "top_p", "top_k", "seed", "stop", "tempature", "max_tokens"}
    for field in faults:
        assert f"{field}=" in str(caught.value)


def test_min_tokens_above_max_tokens_says_both_numbers():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(ParameterError, match=r"min_tokens=6: .*max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=6).max_tokens is None


def test_unknown_fields_are_faults_that_suggest_the_near_one():
    with pytest.raises(ParameterError, match=r"temprature=1: .*did you mean temperature\?"):
        SamplingParams(temprature=1)
    with pytest.raises(ParameterError, match=r"max_new_token=.*max_new_tokens"):
        SamplingParams(max_new_token=1)
    with pytest.raises(ParameterError) as caught:
        SamplingParams(zzqx=1)
    assert "did you mean" not in str(caught.value)


def test_fields_of_later_issues_are_unknown_until_they_work():
    for field in ("logit_bias", "repetition_penalty", "logprobs", "use_beam_search"):
        with pytest.raises(ParameterError, match=field):
            SamplingParams(**{field: 1})


EXAMPLES = {
    "max_tokens": 9, "min_tokens": 3, "n": 2, "seed": 8, "temperature": 0.5, "stop": ("x",), "end_token_ids": (4,),
    "include_stop_str_in_output": True,
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias):
    field = ALIASES[alias]
    value = EXAMPLES[field]
    assert SamplingParams(**{alias: value}) == SamplingParams(**{field: value})
    assert SamplingParams.from_dict({alias: value}) == SamplingParams(**{field: value})
    with pytest.raises(ParameterError, match=f"{field}=.*stands beside {alias}"):
        SamplingParams(**{alias: value, field: value})
    with pytest.raises(ParameterError, match=f"{alias}=.*stands beside {field}"):
        SamplingParams(**{field: value, alias: value})


def test_an_alias_is_checked_like_its_field():
    with pytest.raises(ParameterError) as caught:
        SamplingParams(max_new_tokens=0)
    assert caught.value.field == "max_tokens"


def test_fields_are_keywords_only():
    with pytest.raises(TypeError):
        SamplingParams(1.0)


FULL = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=-3, stop="a", stop_token_ids=[1, [2, 3]])


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
    for params in (FULL, SamplingParams()):
        back = pickle.loads(pickle.dumps(params, protocol))
        assert back == params
        assert back.row == params.row
        assert repr(back) == repr(params)


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
