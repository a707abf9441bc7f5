"""Which grammar a request asks for."""

from __future__ import annotations

import pytest

from klero import SamplingParams
from klero.grammar import Source, source_of


@pytest.mark.parametrize(
    "asked, source",
    [
        ({}, None),
        ({"json": {"type": "integer"}}, Source("json", '{"type":"integer"}')),
        ({"json": True, "json_whitespace": 2}, Source("json", "true", 2)),
        ({"json_object": True}, Source("json_object")),
        ({"json_object": True, "json_whitespace": 1}, Source("json_object", "", 1)),
        ({"json_object": False}, None),
        ({"regex": "[0-9]+"}, Source("regex", "[0-9]+")),
        ({"choice": ["yes", "né\n"]}, Source("choice", '["yes", "né\\n"]')),
        ({"grammar": 'root ::= "a"'}, Source("grammar", 'root ::= "a"')),
    ],
)
def test_a_source_is_the_field_and_its_text(asked, source):
    assert source_of(SamplingParams(**asked)) == source


def test_a_structural_tag_is_canonical_json():
    tag = {"triggers": ["<f"], "structures": [{"end": "", "begin": "<f>", "schema": {"type": "null"}}]}
    source = source_of(SamplingParams(structural_tag=tag, json_whitespace=3))
    assert source.field == source.kind == "structural_tag"
    assert source.whitespace == 3
    assert source == source_of(SamplingParams(structural_tag={**tag, "type": "structural_tag"}, json_whitespace=3))


def test_equal_sources_are_one_key():
    asked = {"choice": ["a", "b"]}
    assert len({source_of(SamplingParams(**asked)), source_of(SamplingParams(**asked))}) == 1
    assert source_of(SamplingParams(choice=["b", "a"])) != source_of(SamplingParams(**asked))
