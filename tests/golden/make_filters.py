"""The maker of filters.json: rows under the filters beside top-k, top-p and min-p, by the NumPy reference.

    python -m tests.golden.make_filters            write the file anew (a change of values is a change of docs/draw.md)
    python -m tests.golden.make_filters --check    compare, write nothing, exit with 1 on a difference

An input is a name, logits (hex of binary32 bits), parameters, seed, position and child. Made are the token, the kept
ids in the total order, the number of tokens left after each filter, and the coin where XTC is on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.golden.make import floats, hexes

from klero.lots.noise import COIN, uniform
from klero.params import SamplingParams, seed_bits
from klero.sampling.fused.reference import sample_row

PATH = Path(__file__).with_name("filters.json")


def made_row(row: dict[str, Any]) -> dict[str, Any]:
    """One row with its right values."""
    params = SamplingParams(**row["params"])
    seed, position, child = seed_bits(int(row["seed"])), row["position"], row["child"]
    drawn = sample_row(floats(row["logits"]), params.row, seed, position, child)
    inputs = {key: row[key] for key in ("name", "logits", "params", "seed", "position", "child")}
    coin = {"coin": hexes(uniform(seed, position, child, COIN))[0]} if params.xtc_probability > 0 else {}
    return inputs | coin | {"left": dict(drawn.stages), "kept": drawn.kept.tolist(), "token": drawn.token}


def text_of(golden: dict[str, Any]) -> str:
    """The file's text: one row a line."""
    rows = ",\n".join(json.dumps(made_row(row), separators=(",", ":")) for row in golden["rows"])
    return f'{{"about":{json.dumps(golden["about"])},"rows":[\n{rows}]}}\n'


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make_filters", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    asked = parser.parse_args(arguments)
    old = PATH.read_text()
    new = text_of(json.loads(old))
    if not asked.check:
        PATH.write_text(new)
    elif old != new:
        for number, (before, after) in enumerate(zip(old.splitlines(), new.splitlines(), strict=True), 1):
            if before != after:
                print(f"{PATH.name}:{number}:\n  file {before}\n  made {after}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
