"""The example of llama.cpp: on a fake of its API everywhere, and on the default model where both are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.models.fake_llamacpp import FakeLlamaCpp

from klero.engine.models import llamacpp

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llamacpp.py"
have_package = importlib.util.find_spec("llama_cpp") is not None


def test_it_runs_on_a_fake_of_the_api(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlamaCpp())
    monkeypatch.setattr(llamacpp, "_keep", {})
    pieces = [chr(i) for i in range(32, 127)]
    file = tmp_path / "toy.gguf"
    file.write_bytes(b"GGUF" + json.dumps({"pieces": pieces, "control": [], "eog": []}).encode())
    runpy.run_path(str(EXAMPLE))["main"](str(file))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" -> ")[0] for line in lines[:-1]] == [
        "'The capital of France is'", "'Once upon a time'", "'Once upon a time'", "'Three colours:'"
    ]  # fmt: skip
    assert [re.search(r"\((\w+), seed (\d+)\)$", line).groups() for line in lines[1:-1]] == [
        ("length", "7"), ("length", "7"), ("length", "1")
    ]  # fmt: skip
    assert re.fullmatch(r"\d+ tokens/s", lines[-1])


@pytest.mark.smollm2
@pytest.mark.skipif(not have_package, reason="llama-cpp-python is not installed: pip install '.[llamacpp]'")
def test_it_runs_on_the_default_model():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True, env=environ)
    assert "Paris" in done.stdout
