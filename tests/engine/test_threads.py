"""Threads and spinning: what reaches whom, what comes too late, and the warning on injected readings."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys

import pytest

from klero import LLM, OptionError
from klero.engine import threads
from klero.testing.models import ToyModel


def python(code: str, **environ: str) -> str:
    """What a fresh Python prints, without the settings of this one."""
    kept = {name: value for name, value in os.environ.items() if name not in (threads.SPIN, "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=kept | environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


MAKE = "import os, sys; from klero import LLM; from klero.testing.models import ToyModel\n"


def test_threads_reach_the_kernels_and_torch():
    code = MAKE + "import torch; LLM(ToyModel(), threads=3); from klero.device import num_threads\n"
    assert python(code + "print(num_threads(), torch.get_num_threads())") == "3 3"


def test_none_leaves_the_environment_alone():
    code = MAKE + "import torch; LLM(ToyModel()); from klero.device import num_threads\n"
    code += f"print(num_threads(), torch.get_num_threads(), os.environ.get({threads.SPIN!r}))"
    assert python(code, KLERO_NUM_THREADS="4", OMP_NUM_THREADS="2") == "4 2 None"
    assert python(code, KLERO_NUM_THREADS="1", OMP_NUM_THREADS="1", GOMP_SPINCOUNT="7") == "1 1 7"


def test_spin_acts_before_torch_is_there():
    """libgomp itself says what it read."""
    code = MAKE + "LLM(ToyModel(), spin=1234); print('torch' in sys.modules, flush=True); import torch"
    kept = {name: value for name, value in os.environ.items() if name not in (threads.SPIN, "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=kept | {"OMP_DISPLAY_ENV": "VERBOSE"}
    )
    assert done.stdout.strip() == "False"
    if sys.platform == "linux":
        assert "GOMP_SPINCOUNT = '1234'" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="torch uses GNU OpenMP on Linux only")
def test_spin_comes_too_late_once_openmp_is_loaded():
    code = "import torch\n" + MAKE + "from klero import OptionError\n"
    code += "try: LLM(ToyModel(), spin=1000)\nexcept OptionError as error: print(error)\nelse: print('taken')"
    said = python(code)
    assert said.startswith("spin=1000: OpenMP is loaded")
    assert "set GOMP_SPINCOUNT=1000 in the environment before Python starts" in said
    assert python(code, GOMP_SPINCOUNT="1000") == "taken"


@pytest.mark.parametrize(
    "name, value", [("threads", 0), ("threads", True), ("threads", 1.0), ("spin", -1), ("spin", "1")]
)
def test_what_is_no_number_of_that_kind(name, value, monkeypatch):
    monkeypatch.setenv("KLERO_NUM_THREADS", "1")
    with pytest.raises(OptionError, match=f"{name}={value!r}: must be an integer >= {int(name == 'threads')}, or None"):
        LLM(ToyModel(), **{name: value})
    assert os.environ["KLERO_NUM_THREADS"] == "1"


def test_spin_elsewhere_than_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OptionError, match="torch uses on Linux only"):
        threads.set_spin(5)


@pytest.mark.parametrize(
    "environ, long",
    [
        ({}, True),
        ({"GOMP_SPINCOUNT": "1000"}, False),
        ({"GOMP_SPINCOUNT": "0"}, False),
        ({"GOMP_SPINCOUNT": " 2k "}, False),
        ({"GOMP_SPINCOUNT": "300 K"}, True),
        ({"GOMP_SPINCOUNT": "1m"}, True),
        ({"GOMP_SPINCOUNT": "INFINITY"}, True),
        ({"GOMP_SPINCOUNT": "many", "OMP_WAIT_POLICY": "passive"}, False),
        ({"GOMP_SPINCOUNT": "k"}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, True),
        ({"GOMP_SPINCOUNT": "1m", "OMP_WAIT_POLICY": "PASSIVE"}, True),
    ],
)
def test_what_the_environment_says_of_spinning(environ, long):
    assert threads.spins_long(environ) is long


class Readings:
    """A clock and a counter of waiting that go on as told."""

    def __init__(self, num_threads=2):
        self.now, self.total, self.num_threads = 100.0, 5.0, num_threads
        self.watch = threads.Watch(waited=lambda: self.total, clock=lambda: self.now, threads=lambda: self.num_threads)

    def after(self, seconds, waited):
        self.now += seconds
        self.total = None if waited is None or self.total is None else self.total + waited
        self.watch.look()


@pytest.fixture
def said(monkeypatch, caplog):
    monkeypatch.setattr(threads, "_warned", False)
    monkeypatch.delenv(threads.SPIN, raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    caplog.set_level(logging.WARNING, "klero")
    return caplog


def test_a_busy_neighbour_is_named_once(said):
    readings = Readings()
    readings.after(2.0, 0.02)  # quiet
    assert said.messages == []
    readings.after(1.0, 0.9)  # too soon to say
    assert said.messages == []
    readings.after(1.0, 0.9)
    assert "waited 0.9 s per second for a core, and torch's 2 threads spin" in said.text
    assert "GOMP_SPINCOUNT=1000" in said.text
    assert "LLM(threads=1)" in said.text
    readings.after(2.0, 2.0)
    Readings().after(2.0, 2.0)
    assert len(said.messages) == 1


@pytest.mark.parametrize(
    "num_threads, spin, waited", [(1, None, 2.0), (2, "1000", 2.0), (2, None, 0.4), (2, None, None)]
)
def test_what_is_not_ruinous(said, monkeypatch, num_threads, spin, waited):
    """One thread; bounded spinning; hardly any waiting; a system that does not say."""
    if spin is not None:
        monkeypatch.setenv(threads.SPIN, spin)
    Readings(num_threads).after(2.0, waited)
    assert said.messages == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long threads waited")
def test_the_waiting_of_every_thread_is_read():
    """A number of seconds that never falls while the threads live."""
    first = threads.seconds_waited()
    assert first is not None
    assert 0 <= first <= threads.seconds_waited() < 1e6


def test_no_such_file(monkeypatch):
    monkeypatch.setattr(threads, "Path", lambda path: __import__("pathlib").Path("/nowhere"))
    assert threads.seconds_waited() is None


def test_generate_looks_at_its_steps(said, monkeypatch):
    """Three seconds of the clock pass between two looks, and nine of waiting."""
    clock, waited = itertools.count(0.0, 3.0), itertools.count(0.0, 9.0)

    def watch():
        return threads.Watch(waited=lambda: next(waited), clock=lambda: next(clock), threads=lambda: made.pop())

    made = [2, 2, 1]  # one thread after loading, two at the first step
    monkeypatch.setattr("klero.engine.llm.Watch", watch)
    llm = LLM(ToyModel())
    assert said.messages == []
    llm.generate([[1, 2]])
    assert "waited 3.0 s per second" in said.text
