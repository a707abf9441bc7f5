"""Threads with a large stack."""

from __future__ import annotations

import os
import threading

import pytest

from klero.grammar.deep import on_large_stack


def test_work_comes_back_and_errors_too():
    assert on_large_stack(lambda: 5) == 5
    with pytest.raises(ValueError, match="no"):
        on_large_stack(lambda: int("no"))


def test_the_threads_are_started_once_and_leave_the_size_of_others_alone():
    names = {on_large_stack(lambda: threading.current_thread().ident) for _ in range(50)}
    assert len(names) <= 2
    assert threading.stack_size() == 0
    found = []

    def watch():
        found.extend(threading.stack_size() for _ in range(20_000))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(200):
        on_large_stack(lambda: None)
    watcher.join()
    assert set(found) == {0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_starts_its_own():
    assert on_large_stack(lambda: 5) == 5
    pid = os.fork()
    if not pid:
        os._exit(on_large_stack(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
