"""klero.sample's contract: seeds, positions, children, parameters, what is not logits; and one compiled kernel."""

import numpy as np
import pytest

from klero import LogitsError, ParameterError, SamplingParams, sample
from klero.device import HAVE_NUMBA

ROWS = np.tile(np.linspace(-1, 1, 200, dtype=np.float32), (4, 1))
HOT = SamplingParams(temperature=5)


def tokens(**arguments):
    return sample(ROWS, **({"params": HOT, "positions": 3} | arguments)).token_ids.tolist()


def test_results_have_their_dtypes():
    sampled = sample(ROWS, HOT, positions=3)
    kinds = [sampled.token_ids.dtype, sampled.status.dtype, sampled.num_kept.dtype, sampled.seeds.dtype]
    assert kinds == [np.int32, np.uint8, np.int32, np.uint64]


def test_seeds_from_params_and_from_the_argument_are_the_same_seeds():
    by_params = sample(ROWS, SamplingParams(temperature=5, seed=-9), positions=3)
    by_argument = sample(ROWS, HOT, positions=3, seeds=-9)
    assert by_params.token_ids.tolist() == by_argument.token_ids.tolist()
    assert by_params.seeds.tolist() == by_argument.seeds.tolist() == [2**64 - 9] * 4
    each = [SamplingParams(temperature=5, seed=s) for s in range(4)]
    assert tokens(params=each) == tokens(seeds=[0, 1, 2, 3]) == tokens(seeds=np.arange(4))
    assert tokens(seeds=np.array([2**64 - 1] * 4, np.uint64)) == tokens(seeds=-1)
    assert tokens(seeds=np.full(4, -1, np.int8)) == tokens(seeds=-1)


def test_a_row_without_a_seed_gets_a_fresh_one_and_reports_it():
    first, second = (sample(ROWS, HOT, positions=3) for _ in range(2))
    assert len({*first.seeds.tolist(), *second.seeds.tolist()}) == 8
    assert sample(ROWS, HOT, positions=3, seeds=first.seeds).token_ids.tolist() == first.token_ids.tolist()
    mixed = [SamplingParams(temperature=5, seed=0), HOT, HOT, HOT]
    assert sample(ROWS, mixed, positions=3).seeds[0] == 0
    assert sample(ROWS, mixed, positions=3).seeds[1] != sample(ROWS, mixed, positions=3).seeds[1]
    some = sample(ROWS, HOT, positions=3, seeds=[5, None, 5, None]).seeds.tolist()
    assert some[0] == some[2] == 5
    assert some[1] != some[3]


def test_position_child_and_seed_each_give_other_lots():
    base = tokens(seeds=[1, 2, 3, 4])
    assert tokens(seeds=[1, 2, 3, 4], positions=4) != base
    assert tokens(seeds=[1, 2, 3, 4], children=1) != base
    assert tokens(seeds=[5, 6, 7, 8]) != base
    assert tokens(seeds=[1, 2, 3, 4], positions=[3] * 4, children=[0] * 4) == base


@pytest.mark.parametrize(
    "arguments, field",
    [
        ({"seeds": 1, "params": SamplingParams(temperature=1, seed=1)}, "seeds"),
        ({"seeds": [1] * 4, "params": [HOT, HOT, HOT, SamplingParams(seed=2)]}, "seeds"),
        ({"seeds": [1, 2, 3]}, "seeds"),
        ({"seeds": 2**64}, "seeds"),
        ({"seeds": -(2**63) - 1}, "seeds"),
        ({"seeds": [0, 1, 2, 2**64]}, "seeds"),
        ({"seeds": 1.5}, "seeds"),
        ({"seeds": True}, "seeds"),
        ({"seeds": np.ones(4, bool)}, "seeds"),
        ({"seeds": np.ones((4, 1), int)}, "seeds"),
        ({"seeds": "7"}, "seeds"),
        ({"positions": -1}, "positions"),
        ({"positions": 2**32}, "positions"),
        ({"positions": 1.0}, "positions"),
        ({"positions": True}, "positions"),
        ({"positions": None}, "positions"),
        ({"positions": [0, 1, 2]}, "positions"),
        ({"positions": [0, 1, 2, -1]}, "positions"),
        ({"positions": [[0, 1, 2, 3]]}, "positions"),
        ({"positions": ["a"] * 4}, "positions"),
        ({"children": -1}, "children"),
        ({"children": [0, 1]}, "children"),
        ({"children": 2**32}, "children"),
        ({"children": 0.5}, "children"),
        ({"params": [HOT] * 3}, "params"),
        ({"params": [HOT] * 5}, "params"),
        ({"params": []}, "params"),
        ({"params": [{"temperature": 1}] * 4}, "params"),
        ({"params": [None] * 4}, "params"),
    ],
)
def test_bad_arguments_name_their_field(arguments, field):
    with pytest.raises(ParameterError) as caught:
        tokens(**arguments)
    assert caught.value.field == field
    assert f"{field}=" in str(caught.value)


def test_the_ends_of_positions_and_children():
    assert tokens(positions=2**32 - 1, children=2**32 - 1, seeds=1)
    for five in (np.uint64(5), np.int8(5), np.array(5)):
        assert tokens(positions=five, seeds=1) == tokens(positions=5, seeds=1)


@pytest.mark.parametrize(
    "logits, says",
    [
        (np.zeros(5, np.float32), r"logits\[None\]"),
        (np.zeros((1, 2, 3), np.float32), r"\[R, V\]"),
        (np.zeros((2, 0), np.float32), "width"),
        (np.zeros((1, 3), np.float64), "float64"),
        (np.zeros((1, 3), np.int32), "int32"),
        (np.zeros((1, 3), np.int16), "int16"),
        (np.zeros((1, 3), bool), "bool"),
        (np.zeros((1, 3), object), "object"),
        ([[0.0, 1.0]], "list"),
        (None, "NoneType"),
        (np.broadcast_to(np.float32(0), (1, 2**22 + 1)), "4194304"),
    ],
)
def test_what_is_not_logits(logits, says):
    with pytest.raises(LogitsError, match=says):
        sample(logits, HOT, positions=0)


def test_torch_dtypes_that_are_not_logits():
    torch = pytest.importorskip("torch")
    for wrong in (torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(3)):
        with pytest.raises(LogitsError):
            sample(wrong, HOT, positions=0)


@pytest.mark.parametrize("backend", ["gpu", "", "numpy", None])
def test_an_unknown_backend_names_those_there_are(backend):
    with pytest.raises(ValueError, match="auto, reference, cpu"):
        sample(ROWS, HOT, positions=0, backend=backend)


def test_fields_of_a_request_are_outside_the_contract():
    request = SamplingParams(temperature=5, n=4, max_tokens=1, stop="a", stop_token_ids=[0], echo=True)
    assert tokens(params=request, seeds=1) == tokens(seeds=1)


@pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
def test_no_shape_or_layout_compiles_the_kernel_again():
    from klero.sampling.fused.cpu import sample_rows

    half = ROWS.astype(np.float16)
    bits = (ROWS.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    for rows in (ROWS, bits):
        sample(rows, HOT, positions=0, seeds=1)
    compiled = len(sample_rows.signatures)
    layouts = (ROWS[::2], ROWS[:, ::3], np.asfortranarray(ROWS), ROWS[:1], ROWS[:0], ROWS.astype(">f4"))
    for rows in (ROWS, bits, half, *layouts):
        frozen = rows.copy()
        frozen.flags.writeable = False
        for given in (rows, frozen):
            n = len(given)
            sample(given, HOT, positions=0)
            sample(given, [HOT] * n, positions=np.arange(n), seeds=np.arange(n), children=np.arange(n))
            at = np.zeros(n, np.uint32)
            sample(given, HOT, positions=at, seeds=at.astype(np.uint64), children=at)
    assert len(sample_rows.signatures) == compiled
