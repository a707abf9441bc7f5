"""docs/rules.md and docs/porting.md name the fields, aliases and reserved names that exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from klero import SamplingParams
from klero.params.aliases import ALIASES, NEAREST, RESERVED

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


def rows_of(name, title):
    """The cells of the tables of a section, without their heads."""
    parts = re.split(r"^## ", (DOCS / name).read_text(), flags=re.MULTILINE)
    (text,) = [part for part in parts if part.splitlines()[0] == title]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_field_has_a_row_in_the_rules():
    first = re.findall(r"^\| ([^|]*) \|", (DOCS / "rules.md").read_text(), flags=re.MULTILINE)
    assert {name for cell in first for name in cell.split(", ")} >= FIELDS


def test_the_other_spellings_are_the_aliases():
    named = {alias: field for field, also in rows_of("rules.md", "Other spellings") for alias in also.split(", ")}
    assert named == ALIASES


def test_what_is_reserved_is_not_a_field():
    words = {word for row in rows_of("rules.md", "Reserved for later versions") for word in re.findall(r"\w+", row[0])}
    assert FIELDS.isdisjoint(words)
    assert words >= RESERVED


def test_the_names_of_porting_are_fields():
    for row in rows_of("porting.md", "Names"):
        assert set(row[0].split(", ")) <= FIELDS, row[0]


def test_what_errors_suggest_is_in_porting():
    assert set(NEAREST.values()) <= FIELDS
    for name, field in NEAREST.items():
        assert name not in FIELDS | set(ALIASES)
        rows = rows_of("porting.md", "Logprobs") + rows_of("porting.md", "Structured output")
        assert any(name in " ".join(row[1:]) and field in row[0] for row in rows), name


@pytest.mark.parametrize("title", ["Names", "Defaults", "Penalties"])
def test_the_tables_of_porting_have_a_cell_for_each_engine(title):
    widths = {len(row) for row in rows_of("porting.md", title)}
    assert len(widths) == 1


def test_links_of_porting_lead_somewhere():
    for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", (DOCS / "porting.md").read_text()):
        titles = re.findall(r"^#+ (.*)$", (DOCS / target).read_text(), flags=re.MULTILINE)
        assert not anchor or anchor in {title.lower().replace(" ", "-") for title in titles}
