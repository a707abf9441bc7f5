"""The command: what it prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def klero(*arguments, stdin=None, block=()):
    """Run the command as a process; block: modules that cannot be imported."""
    code = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(','))); "
    code += "sys.modules.pop('', None); from klero.cli import main; main()"
    command = [sys.executable, "-c", code, ",".join(block), *arguments]
    sent = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(command, **sent, capture_output=True, text=True, timeout=300)


def test_explain_prints_the_table():
    done = klero("explain", "2,1,0,-1,-2", "--top-k", "3", "--top-p", "0.7", "--min-p", "0.1", "--seed", "11")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "stage          tokens      mass",
        "logits              5  1.000000",
        "min-p               3  0.956659",
        "top-k               3  0.956659",
        "top-p               2  0.870530",
        "-> token 0   seed 11, position 0, child 0",
        "kept: 0 1",
    ]


def test_a_row_may_begin_with_a_minus():
    assert "-> token 2" in klero("explain", "-1,2,3").stdout


def test_explain_reads_a_file(tmp_path):
    np.save(tmp_path / "row.npy", np.array([0, 3, -np.inf], np.float32))
    done = klero("explain", str(tmp_path / "row.npy"))
    assert "-> token 1" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["explain", "1,x"], "must be numbers"),
        (["explain", "nowhere.npy"], "No such file"),
        (["explain", "1,2", "--temperature", "1"], "--seed must be given"),
        (["explain", "1,2", "--top-p", "2", "--temperature", "nan"], "top_p=2.0: must be a number in [0, 1]"),
        (["generate"], "no prompt"),
        (["generate", "x", "--file", "y"], "stand beside"),
        (["generate", "--file", "nowhere.jsonl"], "No such file"),
        (["fetch", "gpt2"], "klero fetches smollm2 and no other"),
        (["bench", "--repeat", "0"], "--repeat=0: must be at least 1"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "x", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["generate", "x", "--model", "./no-such-model"], "no-such-model"),
    ],
)
def test_a_fault_is_one_line_and_exit_code_2(arguments, words):
    done = klero(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be an object"),
        ('{"prompt": 5}', "line 2: prompt=5: must be a text"),
        ("{\n[]", "line 3: must be an object"),
        ('{"prompt": "a\u2028b", "top_k": -2}', "line 2: top_k=-2"),
        ("[" * 200_000, "line 2: not JSON"),
        ('{"temperature": 1}', "line 2: must be an object with one of"),
        ('{"prompt": "x", "top_q": 1}', "line 2: top_q=1: is not a field of SamplingParams; did you mean top_p"),
    ],
)
def test_json_lines_are_checked(line, words):
    done = klero("generate", "--file", "-", stdin='{"prompt": "ok"}\n' + line + "\n")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


def test_the_bare_command_says_what_to_install():
    done = klero("generate", "x", block=["typer"])
    assert done.returncode == 1
    assert "from a clone: pip install -c constraints.txt '.[engine]'" in done.stderr


def test_generating_without_the_engine_says_what_to_install():
    done = klero("generate", "x", block=["torch"])
    assert done.returncode == 2, done.stderr
    assert "klero[engine]" in done.stderr


@pytest.mark.smollm2
def test_the_demo():
    """What `make demo` runs: four prompts in one batch, each with its own parameters."""
    done = klero("generate", "--file", str(ROOT / "examples" / "demo.jsonl"))
    assert done.returncode == 0, done.stderr
    greedy, seeded, hot, stopped = [part.split("--- ") for part in done.stdout.split("=== ")[1:]]
    assert greedy[0].startswith("The capital of France is\n Paris")
    assert "seed 7 " in seeded[1]
    assert "seed 11 " in hot[1]
    assert stopped[0] == "1, 2, 3, 4,\n 5, 6, 7, 8, 9\n"
    assert stopped[1].startswith("stop ', 10'")
    assert "tokens/s" in done.stderr


@pytest.mark.smollm2
def test_one_seed_is_spread_over_the_lines_of_a_file():
    lines = '{"prompt": "a"}\n\n{"prompt": "b", "seed": 3}\n{"prompt": "c"}\n'
    done = klero("generate", "--file", "-", "--json", "--seed", "7", "--max-tokens", "1", stdin=lines)
    assert [json.loads(line)["seed"] for line in done.stdout.splitlines()] == [7, 3, 9], done.stderr


@pytest.mark.smollm2
def test_json_lines_in_and_out():
    lines = [
        {"prompt": "1 2 3 4", "stop": [" 8"], "n_predict": 20},
        {"prompt": "Once upon", "temperature": 0.8, "seed": 7, "n": 2, "max_tokens": 5},
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 3},
    ]
    done = klero("generate", "--file", "-", "--json", stdin="\n".join(map(json.dumps, lines)))
    assert done.returncode == 0, done.stderr
    out = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(o["prompt"], o["index"], o["seed"] == 7, o["finish_reason"]) for o in out] == [
        ("1 2 3 4", 0, False, "stop"),
        ("Once upon", 0, True, "length"),
        ("Once upon", 1, True, "length"),
        (None, 0, False, "length"),
    ]
    assert out[0]["text"] == " 5 6 7"
    assert out[1]["token_ids"] != out[2]["token_ids"]
    assert out[3]["prompt_token_ids"] == [1, 2, 3]
    assert "tokens/s" in done.stderr
