"""What runs here: backends, threads, and ranges of rows."""

import os
import threading

import numpy as np
import pytest

from klero import SamplingParams, sample
from klero.device import HAVE_NUMBA, choose_backend, num_threads, over_rows
from klero.testing import nasty_params, nasty_rows


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 8, 17, 100])
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("grain", [1, 4, 50])
def test_ranges_cover_every_row_once(num_rows, threads, grain):
    seen, lock = [], threading.Lock()

    def work(begin, end):
        with lock:
            seen.append((begin, end))

    over_rows(work, num_rows, threads, grain=grain)
    assert sorted(i for begin, end in seen for i in range(begin, end)) == list(range(num_rows))
    assert len(seen) <= threads


def test_an_error_in_any_range_reaches_the_caller():
    for wrong in (0, 50, 99):

        def work(begin, end, wrong=wrong):
            if begin <= wrong < end:
                raise ZeroDivisionError(wrong)

        with pytest.raises(ZeroDivisionError):
            over_rows(work, 100, 4)
    seen = []
    over_rows(lambda begin, end: seen.append(begin), 100, 4)
    assert len(seen) == 4


def test_threads_come_from_the_environment_or_the_cores(monkeypatch):
    monkeypatch.setenv("KLERO_NUM_THREADS", "3")
    assert num_threads() == 3
    monkeypatch.delenv("KLERO_NUM_THREADS")
    assert num_threads() >= 1
    for wrong in ("0", "-1", "two", "", "1.5"):
        monkeypatch.setenv("KLERO_NUM_THREADS", wrong)
        with pytest.raises(ValueError, match="KLERO_NUM_THREADS"):
            num_threads()


def test_backends():
    assert choose_backend("reference") == "reference"
    assert choose_backend("auto") == ("cpu" if HAVE_NUMBA else "reference")
    with pytest.raises(ValueError, match="must be one of auto, reference, cpu"):
        choose_backend("triton")


def test_a_missing_numba_is_told_with_the_way_out(monkeypatch):
    monkeypatch.setattr("klero.device.HAVE_NUMBA", False)
    assert choose_backend("auto") == "reference"
    with pytest.raises(ValueError, match="pip install numba"):
        choose_backend("cpu")


def test_calls_from_many_threads_at_once_draw_the_same(monkeypatch):
    monkeypatch.setenv("KLERO_NUM_THREADS", "2")
    rows, params = nasty_rows(64, 300, 1), nasty_params(64, 300, 1)
    right = sample(rows, params, positions=0, seeds=np.arange(64)).token_ids.tolist()
    results = []

    def call():
        for _ in range(5):
            results.append(sample(rows, params, positions=0, seeds=np.arange(64)).token_ids.tolist())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [right] * 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own(monkeypatch):
    monkeypatch.setenv("KLERO_NUM_THREADS", "2")
    rows, params = nasty_rows(40, 50, 2), SamplingParams(temperature=1)
    right = sample(rows, params, positions=0, seeds=1).token_ids.tolist()
    child = os.fork()
    if child == 0:
        same = sample(rows, params, positions=0, seeds=1).token_ids.tolist() == right
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
