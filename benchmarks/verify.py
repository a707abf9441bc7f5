"""The gate: nothing is timed before klero is right, and before its peers do the same work. Takes some ten seconds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import klero
from benchmarks import peers
from benchmarks.cases import SETTINGS, R, Rows, Setting
from benchmarks.machine import ROOT

GOLDEN = ROOT / "tests" / "golden" / "draw.json"
BACKENDS = ("cpu", "reference")
REFERENCE_ROWS, PEER_ROWS = 6, 2  # of each kind; sorting a vocabulary takes its time
DRAWS, DRAW_VOCAB = 8000, 96
NEAR = 1e-5  # of the mass: how far float32 sums may move the border of top-p
NEAR_IN_TURN = 1e-3  # the same for llama.cpp, which adds a vocabulary up in turn: 3e-4 too little on peaked rows


def faults(all_rows: Iterable[Rows], say: Callable[[str], None]) -> list[str]:
    """Everything that is wrong; empty: go ahead. Of rows that are fewer or more of others nothing is asked again."""
    all_rows = [rows for rows in all_rows if len(rows.values) == R]
    found = list(golden_faults(say))
    for rows, setting in itertools.product(all_rows, SETTINGS):
        found += reference_faults(rows, setting)
        found += kept_faults(rows, setting)
    for setting in SETTINGS:
        found += draw_faults(setting)
    return found


def golden_faults(say: Callable[[str], None]) -> Iterable[str]:
    """Rows of the golden file whose token or number of kept tokens a backend gets wrong."""
    if not GOLDEN.is_file():
        say(f"no {GOLDEN.relative_to(ROOT)} here: the golden rows are not checked")
        return
    for row in json.loads(GOLDEN.read_text())["rows"]:
        logits = np.array([int(word, 16) for word in row["logits"]], np.uint32).view(np.float32)[None]
        params = klero.SamplingParams.from_dict({**row["params"], "seed": int(row["seed"])})
        for backend in BACKENDS:
            got = klero.sample(logits, params, positions=row["position"], children=row["child"], backend=backend)
            if got.token_ids[0] != row["token"] or got.num_kept[0] != row.get("num_kept", got.num_kept[0]):
                yield f"golden row {row['name']!r} on {backend}: token {got.token_ids[0]}, not {row['token']}"


def reference_faults(rows: Rows, setting: Setting) -> Iterable[str]:
    """Tokens, states or numbers kept that differ between the kernel and the reference."""
    some = rows.values[:REFERENCE_ROWS]
    seeds = list(range(len(some)))
    cpu, reference = (
        klero.sample(some, setting.params, positions=7, seeds=seeds, backend=backend) for backend in BACKENDS
    )
    for name in ("token_ids", "status", "num_kept"):
        if not np.array_equal(getattr(cpu, name), getattr(reference, name)):
            yield f"{rows.name}, {setting.name}: {name} of the kernel and of the reference differ"


def kept_faults(rows: Rows, setting: Setting) -> Iterable[str]:
    """Rows of which a peer keeps something else than klero, beyond ties and the rounding of float32 sums."""
    if setting.greedy:
        yield from greedy_faults(rows, setting)
        return
    some = Rows(rows.name, rows.values[:PEER_ROWS])
    logits = some.as_float32()
    ours = [klero.explain(row, setting.params, seed=0, position=0).kept for row in logits]
    for peer in peers.peers_of(setting):
        for r, theirs in enumerate(peers.kept_sets(peer, some, setting)):
            near = NEAR_IN_TURN if peer == "llama.cpp" else NEAR
            if not same_set(logits[r], ours[r], theirs, setting, near):
                yield f"{rows.name}, {setting.name}: {peer} keeps {len(theirs)} tokens, klero {len(ours[r])}"


def same_set(row: npt.NDArray[np.float32], ours: Any, theirs: set[int], setting: Setting, near: float) -> bool:
    """Whether two kept sets are the same but for tokens that tie with the last one, or lie on the border of top-p."""
    differing = np.array(sorted(set(ours.tolist()) ^ theirs), np.int64)
    off = row[differing] != row[ours].min()
    if not off.any() or setting.top_p is None:
        return not off.any()
    order = np.argsort(-row, kind="stable")
    weights = np.exp((row[order].astype(np.float64) - row.max()) / setting.temperature)
    k = len(row) if setting.top_k is None else setting.top_k
    with_ties = int(np.count_nonzero(row >= row[order[k - 1]]))  # a chain that masks by value keeps all of them
    mass, extra = weights[:k].sum(), weights[k:with_ties].sum()
    before = dict(zip(order.tolist(), (weights.cumsum() - weights) / mass, strict=True))
    for t in differing[off].tolist():
        others = weights[row[order] == row[t]][1:].sum()  # tokens that tie come in any order
        if abs(before[t] - setting.top_p) >= near + (extra + others) / mass:
            return False
    return True


def greedy_faults(rows: Rows, setting: Setting) -> Iterable[str]:
    """Peers whose greedy token is not a largest logit."""
    logits = rows.as_float32()
    for peer in peers.peers_of(setting):
        tokens = np.asarray(peers.draw_call(peer, rows, setting)(), np.int64)
        if not np.array_equal(np.take_along_axis(logits, tokens[:, None], 1)[:, 0], logits.max(axis=1)):
            yield f"{rows.name}, {setting.name}: {peer} does not take the largest logit"


def draw_faults(setting: Setting) -> Iterable[str]:
    """Who does not draw from the filtered, renormalised distribution of one small row."""
    row = np.random.default_rng(3).normal(0, 2, DRAW_VOCAB).astype(np.float32)
    rows = Rows("small", np.tile(row, (DRAWS, 1)))
    kept = klero.explain(row, setting.params, seed=0, position=0).kept
    expected = np.zeros(DRAW_VOCAB)
    expected[kept] = np.exp((row[kept].astype(np.float64) - row.max()) / setting.temperature)
    expected *= DRAWS / expected.sum()
    torch.manual_seed(1)
    drawn = {peer: peers.draw_call(peer, rows, setting)() for peer in peers.peers_of(setting)}
    fixed = np.arange(DRAWS)
    drawn["klero"] = klero.sample(rows.values, setting.params, positions=fixed, seeds=5).token_ids
    for name, tokens in drawn.items():
        if not fits(np.bincount(np.asarray(tokens), minlength=DRAW_VOCAB), expected):
            yield f"{setting.name}: the draws of {name} do not follow the distribution"


def fits(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> bool:
    """Chi-square, rare tokens pooled; the bound is five standard deviations out, and seeds are fixed."""
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    mean = np.append(expected[~rare], expected[rare].sum())
    if counts[expected == 0].any():
        return False
    cells = mean > 0
    chi = float(((seen - mean)[cells] ** 2 / mean[cells]).sum())
    freedom = max(1, int(cells.sum()) - 1)
    return chi < freedom + 5 * float(np.sqrt(2 * freedom))
