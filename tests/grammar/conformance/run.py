"""The JSON Schema Test Suite (draft 2020-12) against klero's grammars, and the tables of docs/grammar.md.

    python -m tests.grammar.conformance.run             fetch the suite, run it, write results.json and the tables
    python -m tests.grammar.conformance.run --tables    write the tables anew from results.json
    python -m tests.grammar.conformance.run --backend xgrammar      run it there, say what came out, write nothing

The suite comes in the sources of the package jsonschema. An instance is checked token by token; after that, texts are
written at random through the masks of each schema, and the package jsonschema says whether they are valid. It reads
patterns as Python does; texts of which it cannot say anything are not counted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.grammar.conformance.checks import Case, Refused, Verdict, byte_backend, compiled, smollm2_backend, verdict
from tests.grammar.conformance.judge import judged
from tests.grammar.conformance.tables import NARROW, RESULTS, WHOLE, reason_of_rule, summary, text_of, write_tables
from tests.grammar.walks import fragments, write

from klero.engine.guides import BACKENDS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "json/tests/draft2020-12/"
TEXTS_PER_SCHEMA = 30


def fetched(folder: Path) -> tuple[str, Path]:
    """The name of the suite and its folder, fetched with pip and unpacked below `folder`."""
    version = importlib.metadata.version("jsonschema")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, f"jsonschema=={version}", "--dest", str(folder)], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return f"jsonschema {version}", next(folder.glob(f"*/{FOLDER}"))


def cases(suite: Path) -> Iterator[list[Case]]:
    """The suite's cases, those of one schema together."""
    for path in sorted(suite.rglob("*.json")):
        feature = path.relative_to(suite).with_suffix("").as_posix()
        for group in json.loads(path.read_text()):
            yield [
                Case(feature, group["description"], group["schema"], test["description"], test["data"], test["valid"])
                for test in group["tests"]
            ]


def written(grammar: Any, group: list[Case]) -> Iterator[tuple[str, bool | None]]:
    """Texts that a grammar lets through, and whether they are valid; None: nobody can say."""
    schema = group[0].schema
    chance = random.Random(json.dumps(schema))
    pieces = [*fragments(schema), *(piece for case in group for piece in fragments(case.instance))]
    for _ in range(TEXTS_PER_SCHEMA):
        text, ended = write(grammar.matcher((256,)), chance, pieces)
        if ended:
            yield text.decode(), judged(schema, text.decode())


def run(suite: Path, name: str, library: str) -> dict[str, Any]:
    """All results, as results.json has them."""
    backend = byte_backend(library)
    features: dict[str, Counter[str]] = {}
    refused: Counter[str] = Counter()
    texts: Counter[str] = Counter(schemas=0, texts=0, unjudged=0)
    narrow, wide, written_wrong = [], [], []
    for group in cases(suite):
        feature, schema_name = group[0].feature, group[0].schema_name
        grammar = compiled(backend, group[0].schema)
        counts = features.setdefault(feature, Counter())
        for case in group:
            found = verdict(grammar, case.instance, case.valid)
            counts[found] += 1
            if found is Verdict.NARROW:
                narrow.append([feature, schema_name, case.name, why_narrow(grammar, case)])
            elif found is Verdict.WIDE:
                wide.append([feature, schema_name, case.name])
        if isinstance(grammar, Refused):
            refused[reason_of_rule(grammar.rule)] += 1
            continue
        texts["schemas"] += 1
        for text, valid in written(grammar, group):
            texts["texts"] += 1
            texts["unjudged"] += valid is None
            if valid is False:
                written_wrong.append([feature, schema_name, text])
    return {
        "suite": name,
        "backend": f"{library} {importlib.metadata.version(library)}",
        "written": dict(texts),
        "smollm2": with_smollm2(suite, backend) if library == "llguidance" else {"cases": 0, "different": []},
        "features": {key: dict(sorted(counts.items())) for key, counts in sorted(features.items())},
        "refused": refused.most_common(),
        "narrow": narrow,
        "wide": wide,
        "written_wrong": written_wrong,
    }


def with_smollm2(suite: Path, byte_backend: Any) -> dict[str, Any]:
    """Whether other tokens than bytes change a verdict, of the features that are not optional."""
    backend, vocabulary = smollm2_backend()
    num_cases, different = 0, []
    for group in cases(suite):
        grammar = compiled(backend, group[0].schema)
        if group[0].feature.startswith("optional") or isinstance(grammar, Refused):
            continue
        of_bytes = compiled(byte_backend, group[0].schema)
        for case in group:
            num_cases += 1
            found = verdict(grammar, case.instance, case.valid, vocabulary)
            if found != verdict(of_bytes, case.instance, case.valid):
                different.append([case.feature, case.schema_name, case.name, found])
    return {"cases": num_cases, "different": different}


def why_narrow(grammar: Any, case: Case) -> str:
    """The reason why a valid instance cannot be written, as far as it is known."""
    if verdict(grammar, whole(case.instance), True) is Verdict.RIGHT:
        return WHOLE
    return NARROW.get(case.feature, "not known")


def whole(value: Any) -> Any:
    """An instance with 1.0 as 1."""
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 + 1 else value


def main(arguments: list[str]) -> int:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.grammar.conformance.run", description=about)
    parser.add_argument("--tables", action="store_true", help="write the tables anew from results.json")
    parser.add_argument("--suite", type=Path, help="the folder draft2020-12 of the suite, instead of fetching it")
    parser.add_argument("--backend", default="llguidance", choices=list(BACKENDS))
    asked = parser.parse_args(arguments)
    if asked.tables:
        results = json.loads(RESULTS.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            name, suite = ("a folder", asked.suite) if asked.suite else fetched(Path(folder))
            results = run(suite, name, asked.backend)
    print(summary(results))
    if asked.backend == "llguidance":
        RESULTS.write_text(text_of(results))
        write_tables(results)
    wrong = results["wide"] + results["written_wrong"]
    for entry in wrong:
        print("wrong:", *entry)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
