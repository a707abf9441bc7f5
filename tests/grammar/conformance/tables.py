"""The results of a run as tables in docs/grammar.md: what was refused, what could not be written, and why."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "grammar.md"
BEGIN, END = "<!-- conformance: written by `make conformance` -->", "<!-- conformance: end -->"
VERDICTS = ("right", "refused", "narrow", "wide")

REFUSALS = (
    (r"'([^']+)' is not a keyword", r"the keyword `\1`"),
    (r'Unimplemented keys: \["([^"]+)"', r"the keyword `\1`"),
    (r"the format '", "a format that is not known"),
    (r"Resource '|Pointer '|names a value, not a schema", "a reference to another document, or to no schema"),
    (r"oneOf", "`oneOf` whose options are not told apart by their types or values"),
    (r"Unsatisfiable|no JSON meets it", "no JSON is valid"),
    (r"beyond the integers|too many digits|its digits may be", "numbers beyond what can be told apart"),
    (r"Failed to generate regex", "numbers beyond what can be told apart"),
    (r"control character", "a control character in `const`, `enum` or `pattern`"),
    (r"must be an integer between", "a count written as 2.0"),
    (r"not disjoint", "`patternProperties` that overlap"),
    (r"regex parse error|look-?around|escape sequence", "a pattern that is not regular, or that nobody reads"),
    (r"the set |categories|flags as", "a pattern that not all read alike"),
)
"""What an error says, and what it is called in the table."""

NARROW = {
    "format": "formats are held, where the standard only notes them",
    "optional/float-overflow": "integers have no exponent",
    "optional/format/date-time": "no leap seconds, T and Z in capitals",
    "optional/format/time": "no leap seconds, Z in capitals",
    "optional/format/email": "no quoted names, no addresses in brackets",
    "optional/format/ipv6": "no IPv4 endings",
    "optional/ecmascript-regex": "control characters are not written, nor is U+FEFF as white space",
}
"""Why a valid instance cannot be written, by feature."""
WHOLE = "a whole number is written without a fraction"


def reason_of_rule(rule: str) -> str:
    """What a refusal is called."""
    for pattern, name in REFUSALS:
        if match := re.search(pattern, rule):
            return match.expand(name)
    return f"other: {rule}"


def totals(results: dict[str, Any]) -> Counter[str]:
    """Cases by verdict."""
    counts: Counter[str] = Counter()
    for feature in results["features"].values():
        counts.update(feature)
    return counts


def summary(results: dict[str, Any]) -> str:
    """What came out, in a few sentences."""
    counts, written, smollm2 = totals(results), results["written"], results["smollm2"]
    return (
        f"{results['suite']} (draft 2020-12), {results['backend']}. {counts.total():,} cases: "
        f"{counts['right']:,} right, {counts['refused']:,} refused, {counts['narrow']:,} too narrow, "
        f"{counts['wide']:,} wrong. {written['texts']:,} texts were written at random through the masks of the "
        f"{written['schemas']:,} schemas that were not refused: {len(results['written_wrong']):,} wrong, "
        f"{written['unjudged']:,} that the package `jsonschema` could not judge. {smollm2['cases']:,} cases that are "
        f"not optional were checked with SmolLM2's tokens too: {len(smollm2['different']):,} verdicts differ."
    )


def tables(results: dict[str, Any]) -> str:
    """The summary and the tables, in Markdown."""
    features = results["features"]
    refused = [name for name, counts in features.items() if counts.keys() == {"refused"}]
    head = ["| feature | cases | right | refused | too narrow | wrong |", "|---|---|---|---|---|---|"]
    lines = [summary(results), "", *head]
    for name, counts in features.items():
        if name not in refused:
            cells = (str(counts.get(verdict, 0)) for verdict in VERDICTS)
            lines.append(f"| {name} | {sum(counts.values())} | {' | '.join(cells)} |")
    lines += ["", "Refused entirely: " + ", ".join(refused) + ".", ""]
    lines += ["| refused because of | schemas |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in results["refused"]]
    narrow = Counter((reason, feature) for feature, *_, reason in results["narrow"])
    lines += ["", "| too narrow because | feature | cases |", "|---|---|---|"]
    lines += [f"| {reason} | {feature} | {count} |" for (reason, feature), count in sorted(narrow.items())]
    return "\n".join(lines)


def document_with_tables(document: str, results: dict[str, Any]) -> str:
    """A document with the tables between its marks."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{rest.split(END)[1]}"


def write_tables(results: dict[str, Any]) -> None:
    """Write the tables into docs/grammar.md."""
    DOCUMENT.write_text(document_with_tables(DOCUMENT.read_text(), results))


def text_of(results: dict[str, Any]) -> str:
    """results.json, one entry a line."""
    parts = []
    for key, value in results.items():
        if isinstance(value, list) and value:
            body = "[\n" + ",\n".join("  " + json.dumps(entry, ensure_ascii=False) for entry in value) + "\n ]"
        elif key == "features":
            rows = (f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in value.items())
            body = "{\n" + ",\n".join(rows) + "\n }"
        else:
            body = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
