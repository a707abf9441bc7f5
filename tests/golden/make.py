"""The maker of draw.json: every right value again, out of the inputs in the file, by the NumPy reference.

    python -m tests.golden.make            write the file anew (a change of its values is a change of docs/draw.md)
    python -m tests.golden.make --check    compare, write nothing, exit with 1 on a difference
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from klero.lots.mass import canonical, lse, masses, scaled, weights
from klero.lots.noise import lot_of_word, lots_of_ids, uniform
from klero.lots.philox import philox4x32
from klero.lots.pinned import exp32, log32
from klero.params import SamplingParams, seed_bits
from klero.sampling.fused.reference import sample_row

PATH = Path(__file__).with_name("draw.json")


def floats(hexes: list[str]) -> np.ndarray:
    """float32 values from the hex of their bits."""
    return np.array([int(h, 16) for h in hexes], np.uint32).view(np.float32)


def words(hexes: list[str]) -> np.ndarray:
    """uint32 values from hex."""
    return np.array([int(h, 16) for h in hexes], np.uint32)


def hexes(values: Any) -> list[str]:
    """The hex of the bits of float32 or uint32 values."""
    return [f"{bits:08x}" for bits in np.ascontiguousarray(np.atleast_1d(values)).view(np.uint32).tolist()]


def mass_of(logits: np.ndarray, maximum: np.float32, reciprocal: np.float32) -> int:
    """Q of some logits: the sum of q, an integer."""
    return int(masses(weights(scaled(logits, maximum, reciprocal))).sum(dtype=np.uint64))


def logprobs_of(raw: np.ndarray, kept: np.ndarray, token: int, reciprocal: float) -> dict[str, Any]:
    """Section 8 of docs/draw.md for one token, every operation rounded to binary32 on its own.

    raw: float32 [V], not rewritten; kept: ids of the token's fellows, itself among them.
    """
    one, r = np.float32(1), np.float32(reciprocal)
    logits = canonical(raw)
    maximum = logits.max()
    q_raw, q_all = mass_of(logits, maximum, one), mass_of(logits, maximum, r)
    q_kept = mass_of(logits[kept], maximum, r)
    drawn = logits[token : token + 1]
    return {
        "processed_logprob": hexes(scaled(drawn, maximum, r) - lse(q_kept))[0],
        "raw_logprob": hexes(scaled(drawn, maximum, one) - lse(q_raw))[0],
        "num_kept": len(kept),
        "ln_kept_mass": hexes(lse(q_kept) - lse(q_all))[0],
    }


def made_row(row: dict[str, Any]) -> dict[str, Any]:
    """One row of the file with its values made anew; a greedy one has a token and nothing else."""
    made = {key: row[key] for key in ("name", "logits", "seed", "position", "child", "params")}
    raw, params = floats(row["logits"]), SamplingParams(**row["params"])
    drawn = sample_row(raw, params.row, seed_bits(int(row["seed"])), row["position"], row["child"])
    made["token"] = drawn.token
    if not params.greedy:
        made["kept"] = sorted(drawn.kept.tolist())
        made |= logprobs_of(raw, np.array(made["kept"]), drawn.token, params.row.reciprocal)
    return made


def made(inputs: dict[str, Any]) -> dict[str, Any]:
    """The whole file from its inputs."""
    where = ("seed", "position", "child", "purpose")
    at = [{key: case[key] for key in where} for case in inputs["noise"] + inputs["uniform"]]
    ids = [case["token_id"] for case in inputs["noise"]]
    lots = [
        case | {"token_id": i, "g": hexes(lots_of_ids(i, **case | {"seed": int(case["seed"])}))}
        for case, i in zip(at, ids, strict=False)
    ]
    uniforms = [
        case | {"u": hexes(uniform(**case | {"seed": int(case["seed"])}))[0]} for case in at[len(ids) :]
    ]
    ciphers = []
    for case in inputs["philox4x32_10"]:
        k0, k1 = (int(h, 16) for h in case["key"])
        four = hexes(philox4x32(words(case["counter"]), (k0, k1)))
        ciphers.append({"counter": case["counter"], "key": case["key"], "words": four})
    x, z, word, big = inputs["exp32"]["x"], inputs["log32"]["x"], inputs["gumbel"]["word"], inputs["lse"]["Q"]
    return {
        "about": inputs["about"],
        "exp32": {"x": x, "y": hexes(exp32(floats(x)))},
        "log32": {"x": z, "y": hexes(log32(floats(z)))},
        "gumbel": {"word": word, "g": hexes(lot_of_word(words(word)))},
        "philox4x32_10": ciphers,
        "noise": lots,
        "rows": [made_row(row) for row in inputs["rows"]],
        "lse": {"Q": big, "y": [hexes(lse(int(q)))[0] for q in big]},
        "uniform": uniforms,
    }


def text_of(golden: dict[str, Any]) -> str:
    """The file's text: one row a line."""
    compact = {"separators": (",", ":")}
    rows = "\n" + ",\n".join(json.dumps(row, **compact) for row in golden["rows"])
    return json.dumps(golden | {"rows": ["@"]}, **compact).replace('["@"]', f"[{rows}]")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    asked = parser.parse_args(arguments)
    old = PATH.read_text()
    new = text_of(made(json.loads(old)))
    if not asked.check:
        PATH.write_text(new)
    elif old != new:
        lines = zip(old.splitlines(), new.splitlines(), strict=True)
        for number, (before, after) in enumerate(lines, 1):
            if before != after:
                print(f"{PATH.name}:{number}:\n  file {before}\n  made {after}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
