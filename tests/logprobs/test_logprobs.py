"""What is said about tokens: worked values, the golden file, an independent softmax, and what must not move."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import ParameterError, SamplingParams, sample, score
from klero.device import HAVE_NUMBA
from klero.logprobs import join
from klero.testing import nasty_row, nasty_rows

BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba"))]
ROW = np.float32([[1.5, 0.75, -0.5, -2]])
FOUR = np.log(np.float32([[0.5, 0.3, 0.15, 0.05]]))
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "draw.json").read_text())["rows"]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def drawn(backend, row, seed=1, **fields):
    """What is said about the token of one row."""
    result = sample(row, SamplingParams(**fields), positions=0, seeds=seed, backend=backend)
    assert result.status.tolist() == [0]
    return result


def near(values):
    return pytest.approx(values, abs=1e-6)


def floats(hexes):
    return np.array([int(bits, 16) for bits in hexes], np.uint32).view(np.float32)


def test_raw_and_processed_of_one_token(backend):
    said = drawn(backend, ROW, temperature=0.5, logprobs=-1).logprobs
    assert (said.token_ids.tolist(), said.rank.tolist(), said.num_kept.tolist()) == ([0], [1], [4])
    assert said.top_ids.tolist() == [0, 1, 2, 3]
    assert said.top.tolist() == near([-0.493414, -1.243414, -2.493414, -3.993414])
    assert (said.raw[0], said.processed[0], said.kept_mass[0]) == (near(-0.493414), near(-0.217011), 0)
    assert said.sampled[0] == said.raw[0]
    said = drawn(backend, ROW, temperature=0.5, logprobs=3, logprobs_mode="processed").logprobs
    assert said.top.tolist() == near([-0.217011, -1.717011, -4.217011])
    assert said.sampled[0] == said.processed[0] == near(-0.217011)


def test_what_top_p_leaves(backend):
    fields = {"temperature": 1, "top_p": 0.75, "logprobs": 4, "return_kept": True, "return_probs": True}
    said = drawn(backend, FOUR, **fields, logprobs_mode="processed").logprobs
    assert said.top_ids.tolist() == [0, 1, 2, 3]
    assert said.top.tolist() == near([-0.470004, -0.980829, -np.inf, -np.inf])
    assert said.kept_mass[0] == near(-0.223144)
    ids, probs = said.kept_of(0)
    assert (ids.tolist(), probs.tolist()) == ([0, 1], near([0.625, 0.375]))
    raw = drawn(backend, FOUR, **fields).logprobs
    assert raw.top.tolist() == near(FOUR[0].tolist())


def test_removed_tokens_follow_the_kept_ones_by_id(backend):
    said = drawn(backend, np.float32([[0, 3, 1, 3, 2]]), temperature=1, top_k=2, logprobs=4, logprobs_mode="processed")
    assert said.logprobs.top_ids.tolist() == [1, 3, 0, 2]
    assert said.logprobs.top.tolist() == near([-0.693147, -0.693147, -np.inf, -np.inf])


@pytest.mark.parametrize(
    "mode, ids, values",
    [("raw", [1, 4, 3], [-0.684494, -1.184494, -1.684494]), ("processed", [1, 0, 2], [0, -np.inf, -np.inf])],
)
def test_a_greedy_row_has_a_list_too(backend, mode, ids, values):
    said = drawn(backend, np.float32([[0.1, 5, -2, 4, 4.5]]), temperature=0, logprobs=3, logprobs_mode=mode).logprobs
    assert (said.top_ids.tolist(), said.top.tolist()) == (ids, near(values))
    assert (said.processed[0], said.kept_mass[0], said.num_kept[0], said.rank[0]) == (0, 0, 1, 1)


def test_the_token_is_its_own_entry(backend):
    said = drawn(backend, ROW, temperature=1, logprobs=0).logprobs
    assert (len(said), said.top_ids.size, list(said[0])) == (1, 0, [0])
    assert said[0][0] == (0, near(-0.493414), 1)


def test_listed_ids_in_the_order_asked(backend):
    said = drawn(backend, ROW, temperature=1, logprob_token_ids=[3, 1]).logprobs
    ids, values = said.listed_of(0)
    assert (ids.tolist(), values.tolist()) == ([3, 1], near([-3.993414, -1.243414]))
    assert said.top_ids.size == 0


def test_a_repeated_listed_id_counts_once(backend):
    for listed in ([3, 1, 3, 1], np.array([3, 3, 1])):
        said = [score(np.repeat(ROW, 2, 0), [0, 1], listed=ids, backend=backend) for ids in (listed, [3, 1])]
        assert [one.listed_of(1)[0].tolist() for one in said] == [[3, 1], [3, 1]]
        assert said[0].listed.tolist() == said[1].listed.tolist() == near([-3.993414, -1.243414] * 2)
    asked = SamplingParams(logprob_token_ids=[3, 1, 3, 1])
    assert sample(ROW, asked, positions=0, backend=backend).logprobs.listed_ids.tolist() == [3, 1]


def test_rank_counts_the_strictly_greater(backend):
    for token, right in ((0, 1), (1, 1), (2, 3), (3, 4)):
        said = score(np.float32([[3, 3, 1, 0]]), [token], backend=backend)
        assert said.rank.tolist() == [right]
    assert score(np.float32([[3, 3, 1, 0]]), [1], backend=backend).sampled[0] == near(-0.781672)


def test_probabilities_only_where_they_were_asked_for(backend):
    result = drawn(backend, FOUR, temperature=1, top_k=2, return_kept=True)
    said = result.logprobs
    assert (said.kept_ids.tolist(), said.num_kept.tolist(), result.probs) == ([0, 1], [2], None)
    assert np.isnan(said.kept_probs).all()
    assert np.isnan(said.sampled).all()
    assert said.rank.tolist() == [0]
    assert said[0] == {}
    assert drawn(backend, FOUR, temperature=1, logprobs=1).probs is None
    assert drawn(backend, FOUR, temperature=1).logprobs is drawn(backend, FOUR, temperature=1).probs is None


def test_rows_that_ask_stand_beside_rows_that_do_not(backend):
    params = [SamplingParams(temperature=1, seed=3), SamplingParams(temperature=1, seed=3, logprobs=2)] * 2
    result = sample(np.repeat(ROW, 4, 0), params, positions=0, backend=backend)
    said = result.logprobs
    assert len(set(result.token_ids.tolist())) == 1
    assert said.top_starts.tolist() == [0, 0, 2, 2, 4]
    assert np.isnan(said.sampled).tolist() == [True, False, True, False]
    assert said.rows(1, 2)[0] == said[1] == said[3]
    both = join([said.rows(0, 2), said.rows(2, 4)])
    assert all(np.array_equal(getattr(both, name), getattr(said, name), equal_nan=True) for name in vars(said))


def test_a_bad_row_says_nothing_and_harms_no_one(backend):
    rows = np.float32([[0, np.nan, 1], [-np.inf] * 3, [0, 1, 2]])
    asking = SamplingParams(temperature=1, logprobs=2, return_kept=True)
    result = sample(rows, asking, positions=0, seeds=1, backend=backend)
    assert result.status.tolist() == [1, 2, 0]
    assert result.logprobs.top_ids.tolist()[:4] == [-1] * 4
    assert result.logprobs.rank.tolist()[:2] == [0, 0]
    assert [result.logprobs[r] for r in (0, 1)] == [{}, {}]
    said = score(rows, [0, 1, 2], num_top=1, backend=backend)
    assert np.isnan(said.sampled).tolist() == [True, True, False]
    assert said.top_ids.tolist() == [-1, -1, 2]


def test_banned_tokens_keep_their_raw_logprob(backend):
    asked = {"temperature": 1, "logprobs": 4, "bad_token_ids": [0], "logit_bias": {1: 3}, "top_k": 2}
    raw = drawn(backend, FOUR, **asked).logprobs
    assert raw.top.tolist() == near(FOUR[0].tolist())
    processed = drawn(backend, FOUR, **asked, logprobs_mode="processed").logprobs
    assert processed.top_ids.tolist() == [1, 2, 0, 3]
    assert processed.top.tolist()[2:] == [-np.inf, -np.inf]


@pytest.mark.parametrize("row", [row for row in GOLDEN if "raw_logprob" in row], ids=lambda row: row["name"])
def test_golden_receipts(backend, row):
    params = SamplingParams(**row["params"], logprobs=0, return_kept=True)
    at = {"positions": row["position"], "children": row["child"], "seeds": int(row["seed"])}
    result = sample(floats(row["logits"])[None], params, backend=backend, **at)
    said = result.logprobs
    bits = [f"{array.view(np.uint32)[0]:08x}" for array in (said.raw, said.processed, said.kept_mass)]
    assert bits == [row["raw_logprob"], row["processed_logprob"], row["ln_kept_mass"]]
    assert said.kept_ids.tolist() == sorted(row["kept"])
    assert said.num_kept.tolist() == [row["num_kept"]]


@given(st.integers(0, 2**32), st.sampled_from([3, 257, 700, 5000]), st.sampled_from([0.1, 1, 30, 1e4]))
def test_against_a_softmax_in_binary64(backend, seed, width, spread):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((4, width)) * spread).astype(np.float32)
    tokens = rng.integers(0, width, 4)
    said = score(rows, tokens, num_top=-1, backend=backend)
    wide = rows.astype(np.float64)
    right = wide - wide.max(1, keepdims=True)
    right -= np.log(np.exp(right).sum(1, keepdims=True))
    tops = np.take_along_axis(right, said.top_ids.reshape(4, width).astype(np.int64), 1)
    assert np.all(np.abs(said.top.reshape(4, width) - tops) <= 2e-6 * np.maximum(1, np.abs(tops)))
    assert np.all(np.abs(said.sampled - right[np.arange(4), tokens]) <= 2e-6 * np.maximum(1, np.abs(said.sampled)))
    assert said.rank.tolist() == [1 + int((row > row[i]).sum()) for row, i in zip(rows, tokens, strict=True)]


@given(
    st.integers(0, 2**32), st.sampled_from([3, 257, 700]), st.sampled_from([None, 0.5, 0.9]),
    st.sampled_from([0.3, 1, 2]),
)  # fmt: skip
def test_the_kept_set_sums_to_one_and_the_rest_is_gone(backend, seed, width, top_p, temperature):
    rows = nasty_rows(6, width, seed, sound=True)
    asked = SamplingParams(
        temperature=temperature, top_p=top_p, logprobs=-1, logprobs_mode="processed", return_probs=True
    )
    result = sample(rows, asked, positions=0, seeds=seed, backend=backend)
    for r in range(6):
        said = result.logprobs.rows(r, r + 1)
        p = np.exp(said.top.astype(np.float64))
        assert abs(p.sum() - 1) <= 1e-6
        kept = np.sort(said.top_ids[: result.num_kept[r]])
        assert kept.tolist() == said.kept_ids.tolist()
        assert np.all(np.isneginf(said.top[result.num_kept[r] :]))
        assert abs(said.kept_probs.astype(np.float64).sum() - 1) <= 1e-6


@given(st.integers(0, 2**16), st.sampled_from(["normal", "ties", "banned", "huge", "peaked"]))
def test_asking_changes_no_token_and_order_no_bit(backend, seed, kind):
    rows = np.stack([nasty_row(kind, 300, seed + i) for i in range(5)])
    plain = SamplingParams(temperature=1, top_p=0.9)
    asking = SamplingParams(temperature=1, top_p=0.9, logprobs=7, return_kept=True, logprob_token_ids=[299])
    at = {"positions": 5, "seeds": seed, "backend": backend}
    without, result = sample(rows, plain, **at), sample(rows, asking, **at)
    assert result.token_ids.tolist() == without.token_ids.tolist()
    turned = sample(rows[::-1], asking, **at)
    for r in range(5):
        one, other = result.logprobs.rows(r, r + 1), turned.logprobs.rows(4 - r, 5 - r)
        assert all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in vars(one))


@pytest.mark.parametrize(
    "given_, name",
    [
        ({"token_ids": [4]}, "token_ids"), ({"token_ids": [-1]}, "token_ids"), ({"token_ids": [0, 1]}, "token_ids"),
        ({"num_top": 5}, "num_top"), ({"num_top": -2}, "num_top"), ({"num_top": True}, "num_top"),
        ({"num_top": 1.5}, "num_top"), ({"listed": [4]}, "listed"), ({"padded_from": 3, "token_ids": [3]}, "token_ids"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_scored_is_named(backend, given_, name):
    with pytest.raises(ParameterError, match=name):
        score(ROW, **{"token_ids": [0], "backend": backend} | given_)


def test_the_sum_leaves_out_tokens_without_a_logprob(backend):
    said = score(np.float32([[0, np.nan], [1, 1], [1, 1]]), [0, 1, 1], backend=backend)
    assert said.cumulative == near(-2 * 0.693147)
    assert np.isnan([said.rows(0, 1).cumulative, said.rows(0, 0).cumulative]).all()  # nothing is said, and not 0
    assert np.isnan(drawn(backend, FOUR, temperature=1, return_kept=True).logprobs.cumulative)


def test_tokens_are_counted_as_in_a_list(backend):
    asked = {"temperature": 1, "logprobs": 2, "logprob_token_ids": [3], "return_kept": True}
    params = [SamplingParams(**asked, top_k=k) for k in (1, 2, 3)]
    said = sample(np.repeat(FOUR, 3, 0), params, positions=0, seeds=1, backend=backend).logprobs
    assert [said.kept_of(i)[0].tolist() for i in (-3, -2, -1)] == [[0], [0, 1], [0, 1, 2]]
    assert [len(said.top_of(i)[0]) for i in (-3, -1, np.int64(1))] == [2, 2, 2]
    assert [said.listed_of(i)[0].tolist() for i in (-2, -1)] == [[3], [3]]
    assert said[-1] == said[2]
    for read in (said.__getitem__, said.top_of, said.listed_of, said.kept_of):
        for i in (3, -4):
            with pytest.raises(IndexError, match="there are 3 tokens"):
                read(i)
        with pytest.raises(TypeError, match=r"an integer; rows\(first, last\) takes a part"):
            read(slice(0, 2))


def test_a_part_has_the_bounds_of_a_slice(backend):
    params = [SamplingParams(temperature=1, logprobs=k, return_kept=True, top_k=k) for k in (1, 2, 3)]
    said = sample(np.repeat(FOUR, 3, 0), params, positions=0, seeds=1, backend=backend).logprobs
    for first, last in ((-2, 3), (0, -1), (1, 99), (-99, 2), (2, 1), (5, 9), (-1, 0)):
        part, right = said.rows(first, last), list(range(3))[first:last]
        assert part.num_kept.tolist() == [r + 1 for r in right]
        assert [part.kept_of(i)[0].tolist() for i in range(len(part))] == [list(range(r + 1)) for r in right]
        assert [part.top_of(i)[0].tolist() for i in range(len(part))] == [list(range(r + 1)) for r in right]


def test_the_distribution_alone_whatever_is_drawn(backend):
    asked = SamplingParams(temperature=1, top_p=0.75, return_probs=True)
    drawn = [sample(FOUR, asked, positions=0, seeds=seed, backend=backend) for seed in range(8)]
    assert {int(one.token_ids[0]) for one in drawn} == {0, 1}
    assert [one.probs.ids.tolist() for one in drawn] == [[0, 1]] * 8
    assert [one.probs.values.tolist() for one in drawn] == [near([0.625, 0.375])] * 8


def test_probabilities_of_a_batch(backend):
    probs = sample(
        np.repeat(FOUR, 2, 0), SamplingParams(temperature=1, top_k=2, return_probs=True), positions=0, seeds=1,
        backend=backend,
    ).probs  # fmt: skip
    assert (probs.starts.tolist(), probs.ids.tolist()) == ([0, 2, 4], [0, 1, 0, 1])
    assert probs.values.tolist() == near([0.625, 0.375] * 2)


def test_a_kept_set_alone_has_no_probabilities_beside_a_row_that_has(backend):
    params = [SamplingParams(temperature=1, top_k=2, return_kept=kept, return_probs=not kept) for kept in (True, False)]
    probs = sample(np.repeat(FOUR, 2, 0), params, positions=0, seeds=1, backend=backend).probs
    assert (probs.starts.tolist(), probs.ids.tolist()) == ([0, 0, 2], [0, 1])
    assert probs.values.tolist() == near([0.625, 0.375])


@pytest.mark.parametrize("asked", [{"logprobs": 4}, {"logprob_token_ids": [3]}], ids=str)
def test_padding_columns_have_no_logprob(backend, asked):
    with pytest.raises(ParameterError, match="without padding"):
        sample(ROW, SamplingParams(**asked), positions=0, padded_from=3, backend=backend)


@pytest.mark.parametrize("columns", [np.array([1, 2]), np.array([2]), 2.0, "2", True], ids=str)
def test_where_padding_begins_is_one_integer(backend, columns):
    with pytest.raises(ParameterError, match="padded_from"):
        score(ROW, [0], padded_from=columns, backend=backend)
