"""What a grammar of a JSON schema takes, token by token: our own cases, random schemas, and the tables of the suite."""

from __future__ import annotations

import json
import random
import re

import pytest
from tests.grammar.conformance.checks import (
    Case,
    Refused,
    Verdict,
    byte_backend,
    compiled,
    orders,
    smollm2_backend,
    takes,
    verdict,
)
from tests.grammar.conformance.judge import found, judged
from tests.grammar.conformance.own_cases import OWN, REFUSED, SETS, UNSATISFIABLE, Own
from tests.grammar.conformance.tables import BEGIN, DOCUMENT, RESULTS, document_with_tables, tables, totals
from tests.grammar.random_schemas import random_schema
from tests.grammar.walks import END, fragments, write

from klero import SamplingParams
from klero.errors import GrammarError
from klero.grammar.source import source_of

RESULTS_OF_RUN = json.loads(RESULTS.read_text())


@pytest.fixture(scope="module")
def backend():
    return byte_backend()


def name_of(own: Own) -> str:
    return f"{own.keyword} {json.dumps(own.schema)[:40]}"


@pytest.mark.parametrize("own", OWN, ids=name_of)
def test_valid_texts_are_taken_and_others_are_not(backend, own):
    grammar = compiled(backend, own.schema)
    assert [text for text in own.valid if not takes(grammar, text)] == []
    assert [text for text in own.invalid if takes(grammar, text)] == []


@pytest.mark.smollm2
def test_other_tokens_than_bytes_change_nothing():
    backend, vocabulary = smollm2_backend()
    for own in OWN:
        grammar = compiled(backend, own.schema)
        assert [text for text in own.valid if not takes(grammar, text, vocabulary)] == [], own.keyword
        assert [text for text in own.invalid if takes(grammar, text, vocabulary)] == [], own.keyword


def test_our_own_cases_are_right():
    """The package jsonschema agrees, where it can judge: Python does not read patterns with categories."""
    for own in OWN:
        unread = r"\\p" in json.dumps(own.schema)
        assert {judged(own.schema, text) for text in own.valid} == {None if unread else True}, own.schema


@pytest.mark.parametrize("keyword, schema", REFUSED)
def test_what_cannot_be_held_is_refused(backend, keyword, schema):
    with pytest.raises(GrammarError) as caught:
        backend.compile(source_of(SamplingParams(json=schema)))
    assert caught.value.field == "json"


@pytest.mark.parametrize("schema", UNSATISFIABLE, ids=json.dumps)
def test_what_nothing_meets_is_refused(backend, schema):
    with pytest.raises(GrammarError):
        backend.compile(source_of(SamplingParams(json=schema)))


@pytest.mark.parametrize("piece", SETS)
def test_a_set_takes_no_character_that_is_not_in_it(backend, piece):
    pattern = f"^{piece}$"
    grammar = compiled(backend, {"type": "string", "pattern": pattern})
    if isinstance(grammar, Refused):
        return
    characters = [*map(chr, range(1, 128)), "é", "ß", "٣", "\u00a0", "\u2028", "\ufeff", "K", "👍"]
    for character in characters:
        spellings = {json.dumps(character), json.dumps(character, ensure_ascii=False), f'"\\{character}"'}
        for spelling in spellings:
            if takes(grammar, spelling):
                assert found(pattern, json.loads(spelling)), spelling


def test_most_sets_are_not_refused(backend):
    grammars = [compiled(backend, {"type": "string", "pattern": f"^{piece}$"}) for piece in SETS]
    assert sum(isinstance(grammar, Refused) for grammar in grammars) <= 8


def write_and_judge(backend, seed: int, num_texts: int) -> int:
    """How many texts came to an end; every one of them must be valid, with no more white space than is allowed."""
    chance, most = random.Random(seed), seed % 3
    schema = random_schema(chance)
    grammar = compiled(backend, schema, json_whitespace=most)
    if isinstance(grammar, Refused):
        return 0
    num_ended = 0
    for _ in range(num_texts):
        text, ended = write(grammar.matcher((END,)), chance, list(fragments(schema)))
        if ended:
            num_ended += 1
            assert judged(schema, text.decode()) is not False, (seed, text.decode(), schema)
            outside = re.sub(r'"(?:\\.|[^"\\])*"', '""', text.decode())
            assert max((len(run) for run in re.findall(r"\s+", outside)), default=0) <= most, (seed, text.decode())
    return num_ended


def test_what_random_schemas_let_through_is_valid(backend):
    assert sum(write_and_judge(backend, seed, 4) for seed in range(150)) > 200


def test_xgrammar_takes_nothing_that_is_invalid():
    """It refuses more, and writes characters in more ways."""
    pytest.importorskip("xgrammar")
    backend = byte_backend("xgrammar")
    for own in OWN:
        grammar = compiled(backend, own.schema)
        wrong = [text for text in own.invalid if judged(own.schema, text) is not True]
        if not isinstance(grammar, Refused):
            assert [text for text in wrong if takes(grammar, text)] == [], own.keyword
    assert [schema for _, schema in REFUSED if not isinstance(compiled(backend, schema), Refused)] == []
    assert sum(write_and_judge(backend, 3 * seed, 8) for seed in range(200)) > 50


@pytest.mark.deep
def test_what_many_random_schemas_let_through_is_valid(backend):
    assert sum(write_and_judge(backend, seed, 12) for seed in range(1000, 4000)) > 10_000


def test_nothing_in_the_suite_is_taken_that_is_invalid():
    assert RESULTS_OF_RUN["wide"] == []
    assert RESULTS_OF_RUN["written_wrong"] == []
    assert RESULTS_OF_RUN["smollm2"]["different"] == []
    assert all("wide" not in counts for counts in RESULTS_OF_RUN["features"].values())


def test_every_valid_instance_that_cannot_be_written_has_a_reason():
    assert [entry for entry in RESULTS_OF_RUN["narrow"] if entry[-1] == "not known"] == []
    assert [reason for reason, _ in RESULTS_OF_RUN["refused"] if reason.startswith("other")] == []


def test_the_tables_of_the_document_say_what_the_results_say():
    text = DOCUMENT.read_text()
    assert document_with_tables(text, RESULTS_OF_RUN) == text
    assert f"{totals(RESULTS_OF_RUN).total():,} cases" in text.split(BEGIN)[1]
    assert totals(RESULTS_OF_RUN).total() > 1800


def test_a_verdict_is_about_what_can_be_written(backend):
    """The checks themselves: each verdict, once."""
    grammar = compiled(backend, {"type": "object", "properties": {"a": {"type": "integer"}, "b": True}})
    assert verdict(grammar, {"b": 1, "a": 2}, True) is Verdict.RIGHT  # in another order
    assert verdict(grammar, {"a": "x"}, False) is Verdict.RIGHT
    assert verdict(grammar, {"a": 1.0}, True) is Verdict.NARROW
    assert verdict(grammar, {"a": 1}, False) is Verdict.WIDE
    assert verdict(compiled(backend, False), 1, False) is Verdict.REFUSED
    assert list(orders([{"a": 1, "b": "é"}])) == ['[{"a":1,"b":"é"}]', '[{"b":"é","a":1}]']


def test_a_pattern_is_read_as_in_a_browser():
    assert found(r"^\d$", "1")
    assert not found(r"^\d$", "٣")
    assert not found("^a$", "a\n")
    assert not found("^.$", "\u2028")
    assert found(r"^\s[$.]$", "\ufeff$")
    assert not found(r"^\S$", "\ufeff")


def test_a_case_wrongly_judged_is_seen():
    """The judge: JSON that is not one, a multiple that floats would miss, a reference that leads nowhere."""
    assert judged({"multipleOf": 0.0001}, "660.0001") is True
    assert judged({"multipleOf": 0.01}, "0.015") is False
    assert judged({"type": "integer"}, "[1") is False
    assert judged({"$ref": "http://example.com/nowhere"}, "1") is None
    assert Case("minimum", "s", {"minimum": 1}, "c", 0, False).valid is judged({"minimum": 1}, "0")


def test_the_tables_count_what_is_listed():
    text = tables(
        {
            "suite": "s",
            "backend": "b",
            "written": {"schemas": 1, "texts": 2, "unjudged": 0},
            "smollm2": {"cases": 4, "different": []},
            "features": {"minimum": {"narrow": 1, "right": 3}, "not": {"refused": 2}},
            "refused": [["the keyword `not`", 1]],
            "narrow": [["minimum", "s", "c", "because"]],
            "wide": [],
            "written_wrong": [],
        }
    )
    assert "6 cases: 3 right, 2 refused, 1 too narrow, 0 wrong" in text
    assert "| minimum | 4 | 3 | 0 | 1 | 0 |" in text
    assert "Refused entirely: not." in text
    assert "| because | minimum | 1 |" in text
