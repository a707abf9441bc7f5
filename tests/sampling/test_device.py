"""What runs here: backends, threads, and ranges of rows."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from klero import SamplingParams, device, sample
from klero.device import HAVE_NUMBA, choose_backend, num_threads, over_rows, ranges_of
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
    assert all(begin < end for begin, end in seen) or num_rows == 0


def test_every_thread_has_a_share_and_large_ones_leave_a_quarter_for_whoever_is_done_first():
    assert ranges_of(8, 2, 4) == [(0, 4), (4, 8)]
    assert ranges_of(13, 3, 4) == [(0, 4), (4, 8), (8, 13)]
    assert ranges_of(31, 2, 4) == [(0, 15), (15, 31)]
    assert ranges_of(32, 2, 4) == [(0, 12), (12, 24), (24, 26), (26, 28), (28, 30), (30, 32)]
    assert ranges_of(9, 2, 1) == [(0, 3), (3, 7), (7, 8), (8, 9)]


def test_an_error_in_any_range_reaches_the_caller():
    for wrong in (0, 50, 99):

        def work(begin, end, wrong=wrong):
            if begin <= wrong < end:
                raise ZeroDivisionError(wrong)

        with pytest.raises(ZeroDivisionError):
            over_rows(work, 100, 4)


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


def two_ranges(first, second):
    """Work for over_rows(.., 8, 2): the caller's part, which waits until a helper has begun, and the helper's."""
    begun, caller = threading.Event(), threading.current_thread()

    def work(begin, end):
        if threading.current_thread() is caller:
            assert begun.wait(10)
            first()
        else:
            begun.set()
            second()

    return work


def test_a_caller_that_is_interrupted_at_work_waits_for_its_helpers():
    done = []

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        over_rows(two_ranges(interrupted, lambda: (time.sleep(0.1), done.append(1))), 8, 2)
    assert done == [1]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to a thread")
def test_a_caller_that_is_interrupted_while_it_waits_waits_on():
    done = []

    def interrupt_the_caller():
        time.sleep(0.1)  # it waits by now
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.1)
        done.append(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            over_rows(two_ranges(lambda: None, interrupt_the_caller), 8, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [1]


def test_what_goes_wrong_in_a_helper_is_the_callers_once_and_ends_the_call():
    def wrong():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        over_rows(two_ranges(lambda: None, wrong), 8, 2)
    seen = []
    over_rows(lambda begin, end: seen.append((begin, end)), 8, 2)
    assert sorted(i for begin, end in seen for i in range(begin, end)) == list(range(8))


def test_a_call_that_is_over_keeps_nothing_alive_though_its_helper_is_busy(monkeypatch):
    monkeypatch.setattr(device, "_pool", device._Pool())
    go_on, left = threading.Event(), []

    def inner():
        rows = np.zeros(8)
        left.append(weakref.ref(rows))
        over_rows(lambda begin, end: rows[begin:end].fill(1), 8, 2)

    def first():
        inner()
        gc.collect()
        left.append(left[0]() is None)
        go_on.set()

    over_rows(two_ranges(first, lambda: go_on.wait(10)), 8, 2)
    assert left[1]


def test_a_call_does_without_helpers_that_are_busy(monkeypatch):
    monkeypatch.setattr(device, "_pool", device._Pool())  # with one helper
    go_on, seen = threading.Event(), []

    def inner():
        over_rows(lambda begin, end: seen.append((begin, end)), 8, 2)  # the helper is waiting for go_on
        go_on.set()

    over_rows(two_ranges(inner, lambda: go_on.wait(10)), 8, 2)
    assert go_on.is_set()
    assert sorted(i for begin, end in seen for i in range(begin, end)) == list(range(8))


def test_a_process_ends_with_its_pool_and_may_use_it_until_then():
    code = """
import atexit, threading
from klero.device import over_rows

def call(name):
    seen = []
    over_rows(lambda begin, end: seen.append(end - begin), 8, 2)
    print(name, sum(seen), flush=True)

class Late:
    def __del__(self, call=call):
        call("late")

call("first")
atexit.register(call, "exit")
threading.main_thread().late = Late()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split("\n") == ["first 8", "exit 8", "late 8", ""]
