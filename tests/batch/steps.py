"""Steps written by hand or drawn at random, laid out by plain loops: what the batch fills is compared with them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from klero.batch import StepArrays

BLOCK_SIZE = 4


class Part(NamedTuple):
    """What a step does for one sequence: the last num_sampled of its new tokens are sampled.

    From position scored_from on, new tokens that are not sampled are scored. embedded: positions before it come as
    embeddings.
    """

    slot: int
    num_computed: int
    num_new: int
    num_sampled: int = 0
    scored_from: int = 10**6
    embedded: int = 0

    @property
    def end(self) -> int:
        return self.num_computed + self.num_new


def token_id(slot: int, position: int) -> int:
    """A different token nearly everywhere."""
    return (slot * 37 + position * 11 + 3) % 61


def embedding(slot: int, position: int) -> np.ndarray:
    """A different embedding everywhere."""
    return np.array([slot, position, -1, 0.5], np.float32)


def tables_of(parts: list[Part], seed: int = 0, block_size: int = BLOCK_SIZE) -> np.ndarray:
    """A block table for each sequence, of shuffled blocks that nobody shares; unused places 0."""
    counts = [-(-part.end // block_size) for part in parts]
    blocks = np.random.default_rng(seed).permutation(sum(counts)).tolist()
    tables = np.zeros((len(parts), max(counts, default=0)), np.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = [blocks.pop() for _ in range(count)]
    return tables


def lay_out(parts: list[Part], tables: np.ndarray, block_size: int = BLOCK_SIZE) -> StepArrays:
    """The arrays of a step."""
    tokens, sampled, scored, starts = [], [], [], [0]
    for n, part in enumerate(parts):
        for position in range(part.num_computed, part.end):
            if position >= part.end - part.num_sampled:
                sampled.append(len(tokens))
            elif position >= part.scored_from:
                scored.append(len(tokens))
            tokens.append((n, part.slot, position, position < part.embedded))
        starts.append(len(tokens))
    is_embedded = np.array([embedded for *_, embedded in tokens], bool)
    rows = [embedding(slot, position) if e else np.zeros(4) for _, slot, position, e in tokens]
    return StepArrays(
        input_ids=np.array([0 if e else token_id(slot, position) for _, slot, position, e in tokens], np.int32),
        positions=np.array([position for _, _, position, _ in tokens], np.int32),
        slot_mapping=np.array(
            [tables[n, position // block_size] * block_size + position % block_size for n, _, position, _ in tokens],
            np.int64,
        ),
        query_starts=np.array(starts, np.int32),
        seq_lens=np.array([part.end for part in parts], np.int32),
        block_tables=tables,
        slots=np.array([part.slot for part in parts], np.int32),
        logits_rows=np.array(sampled + scored, np.int64),
        num_sampled=len(sampled),
        num_computed=np.array([part.num_computed for part in parts], np.int32),
        inputs_embeds=np.array(rows, np.float32) if is_embedded.any() else None,
        is_embedded=is_embedded if is_embedded.any() else None,
    )


def before(parts: list[Part]) -> list[Part]:
    """The step that computed what these parts find computed."""
    return [Part(part.slot, 0, part.num_computed, embedded=part.embedded) for part in parts if part.num_computed]


@st.composite
def mixed_parts(draw: st.DrawFn, max_seqs: int = 6, max_new: int = 11, embeds: bool = True) -> list[Part]:
    """Decodes, decodes with drafts, chunks, whole prompts and scored prompts, in any order."""
    parts = []
    for slot in draw(st.permutations(range(draw(st.integers(1, max_seqs))))):
        computed, new = draw(st.integers(0, 9)), draw(st.integers(1, max_new))
        kind = draw(st.sampled_from(["decode", "drafts", "chunk", "last chunk", "scored"]))
        new = {"decode": 1, "drafts": min(new, 4)}.get(kind, new)
        sampled = {"decode": 1, "drafts": new, "last chunk": 1}.get(kind, 0)
        if kind == "scored":
            sampled = draw(st.integers(0, 1))
        first = draw(st.integers(0, computed + new)) if kind == "scored" else 10**6
        embedded = draw(st.integers(0, computed + new)) if embeds and draw(st.booleans()) else 0
        parts.append(Part(slot, computed, new, sampled, first, embedded))
    return parts


def assert_arrays(arrays: StepArrays, expected: StepArrays) -> None:
    """Every array of two steps is equal, in dtype as well."""
    for name, wanted in vars(expected).items():
        found = getattr(arrays, name)
        if isinstance(wanted, np.ndarray):
            assert isinstance(found, np.ndarray), name
            assert (found.dtype, found.tolist()) == (wanted.dtype, wanted.tolist()), name
        else:
            assert found == wanted, name
