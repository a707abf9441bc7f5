"""Batch invariance: the measuring instrument finds what it should, and the forward keeps its bits."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from klero.engine.models.attention import Scores, paged_attention
from klero.engine.models.invariant import attention as keys_module
from klero.engine.models.invariant import forward as forward_module
from klero.engine.models.invariant import one
from klero.engine.models.invariant.attention import Head, KeyClass, key_class
from klero.engine.models.invariant.cancelling import pairs, product_inputs
from klero.engine.models.invariant.forward import Audit, BatchInvariant
from klero.engine.models.invariant.rows import COUNTS, RowClass, class_of, in_class
from klero.engine.models.paging import PagedCache, PagedStep
from klero.errors import ModelError

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("width", [2, 12, 64, 577])
def test_pairs_cancel(width):
    equal, cancelling = pairs(3, width, torch.Generator().manual_seed(0))
    products = (equal * cancelling).double()
    for row in products:
        plus, minus = sorted(row[row > 0].tolist()), sorted((-row[row < 0]).tolist())
        assert plus == minus
        assert len(plus) == width // 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_the_sum_shows_in_nearly_every_result(dtype):
    """In bfloat16 as well, where of ordinary inputs one result in thousands would differ."""
    rows, weight = product_inputs(16, torch.empty(64, 576, dtype=dtype), 1)
    rows, weight = rows.float(), weight.float()
    one_way, column_by_column = (rows @ weight.T).to(dtype), torch.zeros(rows.shape[0], 64)
    for k in range(576):  # an order of no library; some add in halves themselves
        column_by_column += rows[:, k : k + 1] * weight[:, k]
    assert (one_way != column_by_column.to(dtype)).float().mean() > 0.9


def halved_below(border):
    """A product that adds in two halves when it is called with fewer rows than `border`."""

    def product(rows, weight):
        if rows.shape[0] >= border:
            return F.linear(rows, weight)
        half = weight.shape[1] // 2
        return F.linear(rows[:, :half], weight[:, :half]) + F.linear(rows[:, half:], weight[:, half:])

    return product


def true_class():
    return class_of(F.linear, torch.zeros(40, 64), 1, 512)


@pytest.mark.parametrize("border", [2, 8, 12])
def test_a_class_begins_where_the_order_changes(border):
    assert class_of(halved_below(border), torch.zeros(40, 64), 1).least == max(border, true_class().least)


@pytest.mark.parametrize("border, most", [(17, 16), (40, 32), (500, 384)])
def test_a_class_ends_where_the_order_changes(border, most):
    """The class is that of 16 rows, whatever comes after."""
    split = halved_below(border)

    def product(rows, weight):
        return split(rows, weight) if rows.shape[0] >= border else F.linear(rows, weight.contiguous())

    reverse = lambda rows, weight: (  # noqa: E731
        halved_below(10**9)(rows, weight) if rows.shape[0] >= border else product(rows, weight)
    )
    assert class_of(reverse, torch.zeros(40, 64), 1, 512).most == min(most, true_class().most)


def test_a_product_that_knows_places_is_refused():
    def product(rows, weight):
        result = F.linear(rows, weight)
        result[3] = halved_below(10**9)(rows, weight)[3]
        return result

    with pytest.raises(ModelError, match="deterministic=False"):
        class_of(product, torch.zeros(40, 64), 1)


@pytest.mark.parametrize("least, most", [(1, 512), (4, 24), (12, 16), (16, 512)])
def test_only_counts_of_the_class_are_called(least, most):
    called = []

    def product(rows):
        called.append(rows.shape[0])
        return rows * 2

    found = RowClass(least, most)
    for num_rows in (0, 1, 3, 5, 16, 17, 24, 25, 33, 100, 129, 300, 513, 700):
        rows = torch.arange(num_rows * 3).float().view(num_rows, 3)
        assert torch.equal(in_class(product, rows, found), rows * 2)
    allowed = {c for c in (*COUNTS, *range(128, 513, 16)) if least <= c <= most}
    assert set(called) - {0} <= allowed
    assert len(set(called)) > 1


@pytest.mark.parametrize(
    "num_keys, padded", [(1, 64), (64, 64), (65, 192), (193, 512), (512, 512), (513, 576), (900, 1024)]
)
def test_lengths_of_keys(num_keys, padded):
    assert KeyClass(4, (64, 192), fused=True).num_keys(num_keys) == padded


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_last_block_that_adds_in_another_order_is_found(monkeypatch, dtype):
    """The attention of this test adds in two halves when its keys are 192."""
    whole = keys_module.attend_fused

    def attend(query, keys, values, bias, scaling):
        if keys.shape[2] % 512 != 192:
            return whole(query, keys, values, bias, scaling)
        scores = (query.float() @ keys.float().transpose(2, 3)) * (scaling or keys.shape[3] ** -0.5) + bias
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        halves = [weights[..., part].to(values.dtype).float() @ values[:, :, part].float() for part in HALVES]
        return (sum(halves) / weights.sum(-1, keepdim=True)).to(values.dtype)

    HALVES = (slice(0, 96), slice(96, 10**9))
    monkeypatch.setattr(keys_module, "attend_fused", attend)
    found = keys_module._measure(Head(1, 16, 16, dtype, True), fused=True)
    honest = key_class(Head(1, 16, 16, dtype, True))
    if not honest.fused:
        pytest.skip("the fused attention of this machine does not agree with itself, and is not used")
    assert found is not None
    assert 192 not in found.lengths
    assert set(found.lengths) == set(honest.lengths) - {192}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, width, options",
    [
        ((6, 2), 16, {}),
        ((3, 3), 12, {}),
        ((4, 2), 10, {}),  # odd widths are padded: where a row begins in memory would matter
        ((1, 1), 6, {}),
        ((4, 1), 20, {"window": 9}),
        ((4, 2), 16, {"softcap": 2.0}),
        ((2, 2), 16, {"sinks": True}),
    ],
)
def test_attention_is_the_same_bits_in_any_company(packer, dtype, heads, width, options, threads):
    """Sequences of up to 700 tokens: whole, in chunks and token by token; alone and beside others."""
    torch.set_num_threads(threads)
    try:
        options = dict(options)
        generator = torch.Generator().manual_seed(11)
        if options.pop("sinks", False):
            options["sinks"] = torch.randn(heads[0], generator=generator)
        lengths = (700, 131, 18)
        draw = lambda n, h: torch.randn(n, h, width, generator=generator).to(dtype)  # noqa: E731
        inputs = [(draw(n, heads[0]), draw(n, heads[1]), draw(n, heads[1])) for n in lengths]

        def run(steps, block):
            """steps: lists of (sequence, number of tokens)."""
            p, cache = packer(num_blocks=900 // block + 9, block_size=block), PagedCache(900 // block + 9, block)
            done, found = [0] * len(lengths), [[] for _ in lengths]
            for n in {n for step in steps for n, _ in step}:
                p.join(n)
            for step in steps:
                spans = [(n, slice(done[n], done[n] + count)) for n, count in step]
                query, keys, values = (torch.cat([inputs[n][i][span] for n, span in spans]) for i in range(3))
                arrays = p.step([(n, np.zeros(count, np.int64)) for n, count in step])
                paged = PagedStep(arrays, cache, deterministic=True)
                output = paged_attention(query, keys, values, 0, paged, cache, Scores(0.3, **options))
                for (n, span), rows in zip(spans, output.split([count for _, count in step]), strict=True):
                    found[n].append(rows)
                    done[n] = span.stop
            return [torch.cat(rows) if rows else None for rows in found]

        alone = [run([[(n, length)]], 16)[n] for n, length in enumerate(lengths)]
        together = run([[(1, 100), (0, 300)], [(0, 1), (1, 30), (2, 17)], [(2, 1), (0, 33), (1, 1)], [(0, 366)]], 5)
        one_by_one = run([[(0, 690), (2, 1)]] + [[(2, 1), (0, 1)]] * 10 + [[(2, 7)]], 16)
        for n in range(3):
            assert torch.equal(together[n], alone[n]), n
        assert torch.equal(one_by_one[0], alone[0])
        assert torch.equal(one_by_one[2], alone[2])
    finally:
        torch.set_num_threads(1)


def test_larger_counts_are_measured_when_they_are_needed():
    weight = torch.zeros(40, 64)
    found = class_of(F.linear, weight, 1)
    assert (found.most, found.ended, found.lacks(16), found.lacks(17)) == (16, False, False, True)
    assert not class_of(F.linear, weight, 1, 100).lacks(100)
    assert class_of(F.linear, weight, 1, 100).lacks(200)
    assert not class_of(F.linear, weight, 1, 1000).lacks(2000)


def test_every_place_is_checked():
    """A product that knows its fortieth row is not called with more than 32."""

    def product(rows, weight):
        result = F.linear(rows, weight)
        if rows.shape[0] > 39:
            result[39] = halved_below(10**9)(rows, weight)[39]
        return result

    assert class_of(product, torch.zeros(40, 64), 1, 512).most == 32


GELU_TANH = functools.partial(F.gelu, approximate="tanh")
CURVES = [F.silu, F.gelu, GELU_TANH, F.celu, torch.sigmoid, torch.tanh, torch.exp, torch.cos]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: getattr(curve, "__name__", "gelu_tanh"))
@pytest.mark.parametrize("width", [3, 17, 100, 128, 1536])
def test_a_curve_does_not_know_how_many_rows_it_is_called_with(curve, width, threads):
    torch.set_num_threads(threads)
    try:
        rows = torch.randn(70, width, generator=torch.Generator().manual_seed(1)) * 3
        with BatchInvariant():
            whole = curve(rows)
            for count in (1, 2, 5, 33):
                assert torch.equal(curve(rows[:count]), whole[:count])
                assert torch.equal(curve(rows[count:]), whole[count:])
        torch.testing.assert_close(whole, curve(rows), rtol=1e-6, atol=1e-6)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, outputs", [(48, 36), (13, 11), (50, 9), (64, 128)])
def test_products_do_not_know_how_many_rows_they_are_called_with(dtype, threads, width, outputs):
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(2)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        rows, weight, bias, experts = draw(100, width), draw(outputs, width), draw(outputs), draw(3, width, outputs)
        ends = lambda x: torch.tensor([0, len(x) // 2, len(x)], dtype=torch.int32)  # noqa: E731
        products = {
            "linear": lambda x: F.linear(x, weight),
            "linear with a bias": lambda x: F.linear(x, weight, bias),
            "addmm": lambda x: torch.addmm(bias, x, weight.T),
            "matmul": lambda x: x @ weight.T,
            "experts": lambda x: F.grouped_mm(x, experts, offs=ends(x)) if width % 16 == 0 else x[:, :1],
        }
        with BatchInvariant():
            for name, product in products.items():
                whole = product(rows)
                if name != "experts":
                    assert torch.equal(product(rows[7:8]), whole[7:8]), name
                for count in (2, 6, 10, 34):  # in the middle, where the second expert ends and the third begins
                    middle = slice(50 - count // 2, 50 + count // 2)
                    assert torch.equal(product(rows[middle]), whole[middle]), (name, count)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_what_they_were(bias):
    rows, weight, more = torch.randn(7, 20), torch.randn(5, 20), torch.randn(5)
    with BatchInvariant():
        got = F.linear(rows, weight, more if bias else None), torch.addmm(more, rows, weight.T), rows @ weight.T
    expected = F.linear(rows, weight, more if bias else None), torch.addmm(more, rows, weight.T), rows @ weight.T
    for ours, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_a_product_of_unknown_kind_is_refused_with_the_way_out():
    with BatchInvariant():
        for call in (
            lambda: torch.bmm(torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)),
            lambda: torch.einsum("ij,kj->ik", torch.zeros(2, 3), torch.zeros(4, 3)),
            lambda: torch.zeros(2, 3, 4) @ torch.zeros(2, 4, 5),
        ):
            with pytest.raises(ModelError, match="deterministic=False"):
                call()
        assert torch.equal(torch.ones(1, 4, 1) @ torch.ones(1, 1, 3), torch.ones(1, 4, 3))  # adds nothing up


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ops.aten.mm(x, x.T),
        lambda x: torch.linalg.multi_dot([x, x.T, x]),
        lambda x: torch.cdist(x, x),
        lambda x: torch.ops.aten.sigmoid_(x.clone()),
    ],
)
def test_the_audit_sees_what_goes_past_the_functions_of_torch(call):
    with torch.inference_mode(), Audit(), BatchInvariant(), pytest.raises(ModelError, match="deterministic=False"):
        call(torch.ones(8, 8))


def test_the_audit_lets_measured_calls_pass():
    weight, more = torch.randn(20, 8), torch.randn(20)
    with torch.inference_mode(), Audit(), BatchInvariant():
        F.silu(F.linear(torch.ones(3, 8), weight, more)).softmax(-1).square().mean(-1).rsqrt()
        assert torch.mm(torch.ones(3, 8), mat2=weight.T).shape == (3, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", [torch.rsqrt, lambda x: x.pow(-0.5), lambda x: x**1.7, torch.special.expit])
def test_other_curves(call, dtype):
    rows = torch.rand(70, 1, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.1
    with BatchInvariant():
        whole = call(rows)
        assert all(torch.equal(call(rows[n : n + 3]), whole[n : n + 3]) for n in range(67))


def test_a_curve_in_place_changes_its_input():
    rows = torch.randn(3, 5)
    with BatchInvariant():
        result = F.silu(rows, inplace=True)
        assert torch.equal(result, rows)
        with pytest.raises(ModelError, match="out="):
            torch.exp(rows, out=torch.empty(3, 5))


def test_without_the_classes_the_bits_differ():
    """What all this is for, on this machine: a row alone and in company, by plain calls."""
    rows, weight = product_inputs(16, torch.empty(64, 576), 1)
    whole = F.linear(rows, weight)
    plain = [torch.equal(F.linear(rows[:count], weight), whole[:count]) for count in (1, 2, 3)]
    with BatchInvariant():
        kept = [torch.equal(F.linear(rows[:count], weight), whole[:count]) for count in (1, 2, 3)]
    assert all(kept)
    assert not all(plain) or true_class().least == 1


def chain(row, weight, ends, start):
    """What one_row computes, by its formula: float64 holds the product of two float32 exactly."""
    sums = start.copy()
    begin = 0
    for n, end in enumerate(ends):
        acc = np.zeros(len(weight), np.float32)
        for k in range(begin, end):
            exact = [float(row[k]) * float(w) + float(a) for w, a in zip(weight[:, k], acc, strict=True)]
            acc = np.array(exact, np.float64).astype(np.float32)
        sums = acc if n == 0 and not sums.any() else sums + acc
        begin = end
    return sums


@pytest.mark.parametrize("num_outputs", [8, 9, 15, 16, 37])
@pytest.mark.parametrize("ends", [[1], [24], [8, 24], [5, 6, 23]])
@pytest.mark.parametrize("with_bias", [False, True])
def test_one_row_is_its_formula(num_outputs, ends, with_bias):
    """Small integers with an eighth: sums in float64 round nowhere, so that the two roundings of `chain` are one."""
    source = np.random.default_rng(3)
    row = source.integers(-999, 999, ends[-1]).astype(np.float32) / 8
    weight = source.integers(-999, 999, (num_outputs, ends[-1])).astype(np.float32) / 8
    bias = source.integers(-9, 9, num_outputs).astype(np.float32) if with_bias else np.zeros(num_outputs, np.float32)
    start = torch.from_numpy(bias) if with_bias else None
    got = one.product(torch.from_numpy(row)[None], torch.from_numpy(weight), np.array(ends), start)
    assert np.array_equal(got[0].numpy(), chain(row, weight, ends, bias))


@pytest.mark.parametrize("width, block, ends", [(100, 192, [100]), (192, 192, [192]), (300, 192, [150, 300]),
                                                (384, 192, [192, 384]), (400, 192, [192, 384, 400])])  # fmt: skip
def test_blocks_of_an_inner_axis(width, block, ends):
    assert one.blocks_of(width, block).tolist() == ends


def test_an_order_that_nobody_has_is_not_found():
    rows, weight = product_inputs(4, torch.empty(24, 576), 1)
    sums = (rows[:, ::2] @ weight[:, ::2].T) + (rows[:, 1::2] @ weight[:, 1::2].T)
    assert one.order_of(rows, weight, sums) is None


def test_measurements_are_made_once(monkeypatch):
    weight = torch.randn(11, 13)
    with BatchInvariant():
        F.linear(torch.ones(2, 13), weight)
        monkeypatch.setattr(forward_module, "class_of", lambda *_: pytest.fail("measured again"))
        F.linear(torch.ones(5, 13), weight.clone())
