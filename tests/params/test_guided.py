"""The fields of structured output: canonical text, limits, one grammar at a time, and what is said of the rest."""

import enum
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import GrammarError, ParameterError, SamplingParams
from klero.errors import Fault
from klero.params.guided import GUIDED
from klero.params.json_text import MAX_BYTES, MAX_NESTING, read_json, write_json

LONGEST = "x" * MAX_BYTES
TAGS = {
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}
CANONICAL = '{"structures":[{"begin":"<f>","schema":{"type":"object"},"end":"</f>"}],"triggers":["<f"]}'
ONE_OF_EACH = {
    "json": {"type": "object"}, "json_object": True, "regex": "[a-z]+", "choice": ["yes", "no"],
    "grammar": 'root ::= "a"', "structural_tag": TAGS,
}  # fmt: skip


def rule_of(**fields):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**fields)
    (fault,) = caught.value.faults
    return fault.rule


class Schema:
    """What pydantic's models look like."""

    @classmethod
    def model_json_schema(cls):
        return {"type": "integer"}


class Broken:
    @classmethod
    def model_json_schema(cls):
        raise TypeError("a field has no schema")


class Word(str, enum.Enum):  # noqa: UP042  whose str() is not its text
    YES = "yes"
    NO = "no"


@pytest.mark.parametrize(
    "value, text",
    [
        ({"type": "object", "b": 1, "a": 2}, '{"type":"object","b":1,"a":2}'),  # keys stay where they were
        ('\n{"b" : [1, 2.50, 1e3, -0.0],\t"a": null}', '{"b":[1,2.5,1000.0,-0.0],"a":null}'),
        (True, "true"),
        (np.False_, "false"),
        ("true", "true"),
        ({}, "{}"),
        (Schema, '{"type":"integer"}'),
        ({"const": "κ\n\"\\\u2028"}, '{"const":"κ\\n\\"\\\\\u2028"}'),
        ('{"const": "\\u03ba\\ud83d\\ude00"}', '{"const":"κ\N{GRINNING FACE}"}'),
        ({"enum": ("a", np.int64(3), np.float32(0.5), None, np.True_, Word.NO)}, '{"enum":["a",3,0.5,null,true,"no"]}'),
        ({"maximum": 1.7e308, "minimum": -(10**308)}, f'{{"maximum":1.7e+308,"minimum":{-(10**308)}}}'),
    ],
    ids=str,
)
def test_a_schema_is_kept_as_compact_text(value, text):
    assert SamplingParams(json=value).json == text
    assert SamplingParams(json=text).json == text


TEXTS = st.text(st.characters(codec="utf-8"))
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def spelled(value):
    """1, 1.0 and True are equal in Python and three things in JSON; so are orders of keys."""
    return repr(value)


@given(VALUES)
def test_the_text_of_a_value_is_read_as_that_value(value):
    text = write_json(value)
    assert spelled(json.loads(text)) == spelled(value) == spelled(read_json(text))
    assert write_json(read_json(text)) == text
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@given(st.dictionaries(TEXTS, VALUES, max_size=3), st.sampled_from([None, 1, "\t"]))
def test_a_schema_and_its_text_are_the_same_request(schema, indent):
    params = SamplingParams(json=schema)
    assert SamplingParams(json=json.dumps(schema, indent=indent)) == params == SamplingParams(json=params.json)
    assert spelled(json.loads(params.json)) == spelled(schema)


@pytest.mark.parametrize(
    "value, words",
    [
        ('{"a": 1, "a": 1}', "'a' is twice a key of one object; leave one of the two out"),
        ('{"x": [{"a": 1, "\\u0061": 2}]}', "'a' is twice a key"),
        ('{"maximum": NaN}', "NaN is no number of JSON"),
        ('{"maximum": -Infinity}', "-Infinity is no number of JSON"),
        ('{"maximum": 1e999}', "finite in binary64"),
        ('{"maximum": 1' + "0" * 309 + "}", "finite in binary64"),
        ('{"maximum": 1' + "0" * 5000 + "}", "finite in binary64"),  # Python itself would refuse to read this
        ({"maximum": float("nan")}, "finite in binary64"),
        ({"maximum": float("-inf")}, "finite in binary64"),
        ({"maximum": 10**5000}, "finite in binary64"),
        ({"const": "\ud800"}, "half of a surrogate pair"),
        ({"\udfff": 1}, "half of a surrogate pair"),
        ('{"const": "\\ud800"}', "half of a surrogate pair"),
        ('{"const": "\ud800"}', "half of a surrogate pair"),
        ({1: 2}, "whose keys are text; give text for the int"),
        ({"enum": {1, 2}}, "and no set"),
        ({"const": b"a"}, "and no bytes"),
        ("{'a': 1}", "it is none: Expecting property name"),
        ("", "it is none"),
        ('{"a": 1} x', "it is none: Extra data"),
        ("[1]", "a dict, a bool, JSON text of either"),
        ("null", "a dict, a bool, JSON text of either"),
        (Broken, "Broken raised TypeError: a field has no schema"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) and value.isascii() else type(value).__name__,
)
def test_what_is_no_schema(value, words):
    rule = rule_of(json=value)
    assert rule.startswith("must be ")
    assert words in rule


def nested(depth):
    schema = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


def test_nesting_is_limited_and_never_a_recursion_error():
    deepest, itself = nested(MAX_NESTING), []
    text = json.dumps(deepest)
    assert SamplingParams(json=deepest) == SamplingParams(json=text)
    itself.append(itself)
    too_deep = [nested(MAX_NESTING + 1), {"enum": itself}, text.replace("{}", "[{}]"), "[" * 200_000, '{"a":' * 40_000]
    for value in too_deep:
        assert rule_of(json=value).startswith("must be JSON nested at most 64 deep")
    assert SamplingParams(json={"const": "[" * 100, "enum": [[], []] * 100}).json  # breadth and text are no depth
    assert SamplingParams(json='{"const": "\\"' + "[{" * 100 + '"}').json


def test_the_length_of_a_text_is_limited_in_bytes():
    fits = {"const": "x" * (MAX_BYTES - len('{"const":""}'))}
    assert len(SamplingParams(json=fits).json) == MAX_BYTES
    too_long = f"must be at most {MAX_BYTES} bytes of UTF-8; ask for less in one request"
    assert rule_of(json={"const": fits["const"] + "x"}) == too_long
    assert rule_of(json=json.dumps(fits) + " ") == too_long
    for field in ("regex", "grammar"):
        assert getattr(SamplingParams(**{field: LONGEST}), field) == LONGEST
        for text in (LONGEST + "x", "κ" * (MAX_BYTES // 2 + 1)):
            assert rule_of(**{field: text}) == too_long
    assert len(SamplingParams(choice=[LONGEST[1:], "y"]).choice) == 2
    assert rule_of(choice=[LONGEST, "y"]) == too_long


def test_one_list_in_many_places_is_counted_in_each():
    schema = []
    for _ in range(MAX_NESTING - 2):
        schema = [schema, schema]  # 2^62 entries, written out
    with pytest.raises(Exception, match="must be at most"):
        write_json(schema)


@pytest.mark.parametrize("field", ["regex", "grammar"])
def test_texts(field):
    assert getattr(SamplingParams(**{field: "κ+"}), field) == "κ+"
    assert rule_of(**{field: ""}) == f"must be a non-empty string of at most {MAX_BYTES} bytes"
    assert "half of a surrogate pair" in rule_of(**{field: "a\ud800"})


def test_choices():
    assert SamplingParams(choice=["yes", "no", "κ"]).choice == ("yes", "no", "κ")
    assert SamplingParams(choice=Word).choice == ("yes", "no")
    assert [type(text) for text in SamplingParams(choice=[Word.YES, np.str_("x")]).choice] == [str, str]
    assert len(SamplingParams(choice=map(str, range(10_000))).choice) == 10_000
    rule = "must be a list of 1 to 10000 different non-empty strings"
    for value in ([], "yes", ["a", ""], [1], list(map(str, range(10_001)))):
        assert rule_of(choice=value) == rule
    assert rule_of(choice=["a", "b", "a"]) == rule + ", and 'a' is there twice"


def test_structural_tags():
    for value in (TAGS, CANONICAL, TAGS | {"type": "structural_tag"}, dict(reversed(TAGS.items())), json.dumps(TAGS)):
        assert SamplingParams(structural_tag=value).structural_tag == CANONICAL
    (structure,) = TAGS["structures"]
    for schema in ({"type": "integer"}, '{"type": "integer"}', Schema):
        tags = TAGS | {"structures": [structure | {"schema": schema}]}
        assert '"schema":{"type":"integer"}' in SamplingParams(structural_tag=tags).structural_tag


@pytest.mark.parametrize(
    "change, words",
    [
        ({"structures": []}, "must be {"),
        ({"triggers": []}, "must be {"),
        ({"triggers": [""]}, "must be {"),
        ({"triggers": "<f"}, "must be {"),
        ({"type": "json_schema"}, "must be {"),
        ({"triggers": [f"<f{i}" for i in range(129)]}, "with at most 128 structures and 128 triggers"),
        ({"structures": [{"begin": "<f", "schema": {}, "end": ""}] * 129}, "with at most 128 structures and 128 trig"),
        ({"structures": [{"begin": "<f>", "end": ""}]}, "; 'schema' is missing"),
        ({"structures": [{"begin": "<f>", "schema": {}, "end": "", "stop": "x"}]}, "; 'stop' is not known"),
        ({"structures": [{"begin": 1, "schema": {}, "end": ""}]}, "must be {"),
        ({"structures": [{"begin": "<f>", "schema": 1, "end": ""}]}, "must be a JSON schema"),
        ({"structures": ["<f>"]}, "must be {"),
        ({"format": {}}, "; 'format' is not known"),
        ({"triggers": ["<g"]}, "must be structures that a trigger begins, and none begins '<f>'"),
        ({"triggers": ["<f>x"]}, "none begins '<f>'"),
        ({"triggers": ["<f", "<g"]}, "must be triggers that begin a structure, and '<g' begins none"),
    ],
    ids=str,
)
def test_what_is_no_structural_tag(change, words):
    assert words in rule_of(structural_tag=TAGS | change)


def test_triggers_alone_are_no_structural_tag():
    assert rule_of(structural_tag={"triggers": ["<f"]}).endswith("; 'structures' is missing")
    assert rule_of(structural_tag='{"triggers": ["<f"], "triggers": ["<f"]}').startswith("must be JSON, and 'triggers'")


@pytest.mark.parametrize("field", GUIDED)
def test_which_is_asked_for(field):
    params = SamplingParams(**{field: ONE_OF_EACH[field]})
    assert params.guided == field
    assert params.needs_mask
    assert params.greedy
    assert not params.rewrites
    assert list(params.asked()) == [field]
    assert eval(repr(params)) == params == pickle.loads(pickle.dumps(params)) == SamplingParams(**params.asked())
    assert hash(params) == hash(SamplingParams(**{field: ONE_OF_EACH[field]}))
    assert params != SamplingParams()


def test_nothing_is_asked_for():
    for fields in ({}, {"json_object": False}, {"json_whitespace": 0}, dict.fromkeys(GUIDED)):
        assert SamplingParams(**fields) == SamplingParams()
        assert (SamplingParams(**fields).guided, SamplingParams(**fields).needs_mask) == (None, False)
    params = SamplingParams(thinking_token_budget=0)
    assert (params.guided, params.needs_mask) == (None, True)


@pytest.mark.parametrize("first", GUIDED)
@pytest.mark.parametrize("second", GUIDED)
def test_a_text_follows_one_grammar(first, second):
    if GUIDED.index(first) < GUIDED.index(second):
        with pytest.raises(ParameterError) as caught:
            SamplingParams(**{first: ONE_OF_EACH[first], second: ONE_OF_EACH[second]})
        (fault,) = caught.value.faults
        assert fault.field == second
        assert fault.rule.startswith(f"stands beside {first}; a text follows one grammar: give one of json, ")


@pytest.mark.parametrize("field", GUIDED)
def test_whitespace_is_of_json(field):
    asked = {field: ONE_OF_EACH[field]}
    if field in ("json", "json_object", "structural_tag"):
        assert SamplingParams(**asked, json_whitespace=16).json_whitespace == 16
    else:
        assert rule_of(**asked, json_whitespace=1).startswith("means nothing without json, json_object or structural")


@pytest.mark.parametrize("field", GUIDED)
def test_a_grammar_needs_something_to_end_with(field):
    asked = {field: ONE_OF_EACH[field]}
    assert SamplingParams(**asked, ignore_eos=True, end_token_ids=[3]).guided == field
    with pytest.raises(ParameterError, match=f"^ignore_eos=True: leaves nothing .* end of {field}; give end_token_ids"):
        SamplingParams(**asked, ignore_eos=True)
    assert SamplingParams(thinking_token_budget=3, ignore_eos=True).ignore_eos


def test_a_rule_between_fields_waits_for_each_of_them():
    assert rule_of(json_object=1, regex="a") == "must be True or False"
    assert rule_of(regex="", ignore_eos=True, json_whitespace=1).startswith("must be a non-empty string")


def test_a_grammar_error_is_a_fault_of_its_field():
    error = GrammarError([Fault("regex", "(" * 100, "is not closed")])
    assert isinstance(error, ParameterError)
    assert str(error).startswith("regex='(((")
    assert str(error).endswith("...: is not closed")
    assert pickle.loads(pickle.dumps(error)).faults == error.faults


def test_a_value_that_holds_the_same_thing_often_is_shown_by_its_kind():
    """40 levels of two each: its repr would have 2^40 parts."""
    value = {}
    for _ in range(40):
        value = {"anyOf": [value, value]}
    assert str(Fault("regex", value, "must be text")) == "regex=<dict>: must be text"
    assert str(Fault("stop", ["a"] * 9, "too many")) == f"stop={['a'] * 9}: too many"
