"""The commands around generate: fetch, models, warmup, bench, and how help looks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer.rich_utils
from typer.testing import CliRunner

from klero.cli import bench, options, warmup
from klero.cli.app import app
from klero.engine import LLM, EngineOptions
from klero.engine.models import fetch as models
from klero.errors import ModelError, OptionError
from klero.params import SamplingParams
from klero.server import ServerOptions
from klero.testing.models import ToyModel

COMMANDS = ["generate", "explain", "score", "fetch", "models", "warmup", "bench"]


def run(*arguments, **environment):
    """Run a command in this process; an error is raised."""
    result = CliRunner().invoke(app, list(arguments), env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits(command, width, monkeypatch):
    monkeypatch.setattr(typer.rich_utils, "MAX_WIDTH", width)  # which it reads from TERMINAL_WIDTH when imported
    text = run(*command.split(), "--help", COLUMNS=str(width)).stdout
    assert "…" not in text  # nothing is cut
    assert max(map(len, text.splitlines())) <= width


def test_every_command_is_listed():
    assert all(re.search(rf"│ {command} ", run("--help").stdout) for command in COMMANDS)


@pytest.mark.parametrize("command", [["generate", "x"], ["score", "x"], ["bench"]])
def test_commands_that_run_a_model_take_the_same_options_of_the_engine(command, monkeypatch):
    def load(model, **given):
        raise ModelError(json.dumps([model, given]))

    monkeypatch.setattr(options, "load", load)
    silent = {
        "dtype": "auto", "deterministic": None, "max_num_seqs": 64, "max_num_batched_tokens": 512,
        "max_model_len": None, "block_size": 16, "num_blocks": None, "enable_prefix_caching": True, "swap_space": 0,
        "max_microbatch_tokens": None, "max_microbatch_requests": None, "threads": None, "spin": None,
    }  # fmt: skip
    asked = {
        "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 20, "max_model_len": 7, "block_size": 4,
        "num_blocks": 5, "swap_space": 0.5, "max_microbatch_tokens": 6, "max_microbatch_requests": 8, "threads": 2,
        "spin": 9,
    }  # fmt: skip
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--no-deterministic", "--no-prefix-caching"]
    asked |= {"deterministic": False, "enable_prefix_caching": False}
    for arguments, expected in (([], silent), (words, asked)):
        with pytest.raises(ModelError) as raised:
            run(*command, *arguments)
        assert json.loads(str(raised.value)) == ["smollm2", expected]


def test_unset_options_of_the_engine_are_what_it_takes_by_itself():
    mine = {name: default for name, (_, default) in options.ENGINE_OPTIONS.items() if hasattr(EngineOptions, name)}
    assert mine.keys() >= {"block_size", "enable_prefix_caching", "swap_space", "max_microbatch_tokens"}
    assert mine == {name: getattr(EngineOptions(), name) for name in mine}


def test_fetch_says_where_things_lie(monkeypatch, tmp_path):
    (tmp_path / "file.gguf").touch()
    one = models.Fetchable("tiny", "a tiny model", lambda: tmp_path / "converted", lambda: tmp_path / "file.gguf")
    monkeypatch.setitem(models.FETCHABLE, "tiny", one)
    said = run("fetch", "tiny").stdout
    assert "a tiny model" in said
    assert str(tmp_path / "converted") in said
    assert str(tmp_path / "file.gguf") in said
    (tmp_path / "file.gguf").unlink()  # an installed wheel's file is not copied
    assert "file.gguf" not in run("fetch", "tiny").stdout


def test_fetch_of_another_name():
    with pytest.raises(ModelError, match="klero fetches smollm2"):
        run("fetch", "gpt2")


def test_models_lists_every_one():
    from klero.engine.models.checked import CHECKED, REFUSED

    said = run("models", COLUMNS="80").stdout
    assert {one.name for one in [*CHECKED, *REFUSED]} <= set(re.findall(r"\w+", said))
    assert all(" ".join(one.reason.split()) in " ".join(said.split()) for one in REFUSED)
    assert "smollm2" in said
    assert "any other causal language model" in said


def test_warmup_compiles_all_kinds_and_says_where(monkeypatch):
    kinds = []
    monkeypatch.setattr(warmup, "warm_up", lambda kind, **which: kinds.append(kind) if all(which.values()) else None)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere/else")
    said = run("warmup").stdout
    assert kinds == [np.float32, np.uint16, np.float16]
    assert said.count(" rows: 0.0 s") == 3
    assert "cache: /somewhere/else" in said
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert Path(warmup._kernel_cache().removeprefix("__pycache__ in ")).is_dir()


def test_warmup_without_a_cache_or_without_numba(monkeypatch):
    monkeypatch.setattr(warmup, "cpu_kernel", lambda: None)
    assert "set NUMBA_CACHE_DIR" in warmup._kernel_cache()
    monkeypatch.setattr(warmup, "HAVE_NUMBA", False)
    monkeypatch.setattr(warmup, "warm_up", None)
    assert "nothing to compile" in run("warmup").stdout


def test_warmup_loads_a_model(tiny_model, monkeypatch):
    monkeypatch.setattr(warmup, "warm_up", lambda kind, **which: None)
    assert f"model {tiny_model}: loaded in" in run("warmup", "--model", tiny_model).stdout


def test_bench(tiny_model):
    sizes = ["--requests", "3", "--prompt-tokens", "5", "--new-tokens", "4", "--repeat", "2", "--num-blocks", "64"]
    said = run("bench", tiny_model, *sizes).stdout
    assert "float32, deterministic: 3 requests of 5 + 4 tokens, 2 runs after one to warm up" in said
    words = ["cores", "threads: model", "load", "tokens/s", "s to first token", "schedule", "forward", "sample", "%"]
    assert all(word in said for word in words), said
    found = json.loads(run("bench", tiny_model, *sizes, "--json", "--no-deterministic").stdout)
    assert found["deterministic"] is False
    assert found["num_steps"] == 8  # two runs: one step for the prompts and first tokens, three for the others
    assert sum(found["shares"].values()) == pytest.approx(1)
    rates = found["tokens_per_second"]
    assert 0 < rates["min"] <= rates["median"] <= rates["max"]
    first = found["seconds_to_first_token"]
    assert 0 < first["min"] <= first["median"] <= first["max"] < 12 / rates["min"]


def test_bench_repeats_the_same_work():
    """As many tokens as were asked for, though every token of this model is an end."""
    model = ToyModel(vocab_size=4, end_token_ids=range(4))
    llm = LLM(model, max_num_seqs=4)
    found = bench.measure(
        llm, "toy", SamplingParams(temperature=1.0), requests=4, prompt_tokens=3, new_tokens=6, repeat=3
    )
    assert model.num_forwards == 4 * 6
    assert found.num_steps == 3 * 6
    assert (found.model, found.dtype) == ("toy", "own dtype")


def test_bench_computes_every_prompt_in_every_run(tiny_model):
    """Though the prefix cache has them from the run before."""
    llm = LLM(tiny_model, block_size=4, num_blocks=64)
    found = bench.measure(llm, "tiny", SamplingParams(), requests=3, prompt_tokens=9, new_tokens=2, repeat=2)
    assert llm.engine.times.num_tokens == 2 * 3 * (9 + 2 - 1)  # the last token is not computed
    assert found.dtype == llm.engine.dtype == "float32"


@pytest.mark.parametrize("option", ["--requests", "--prompt-tokens", "--new-tokens", "--repeat"])
def test_bench_refuses_nothing(option):
    with pytest.raises(OptionError, match=f"{option}=0: must be at least 1"):
        run("bench", "nowhere", option, "0")


SERVE = """m --host 0.0.0.0 --port 0 --max-n 3 --keep-alive 2 --log-prompts --max-num-waiting 5 --max-num-seqs 4
--scheduling-policy priority --grammar-backend xgrammar --max-answer-bytes 9 --thinking-token-ids 5,6"""


def test_serve_gives_each_option_its_place(monkeypatch):
    told = []
    monkeypatch.delenv("KLERO_API_KEY", raising=False)
    monkeypatch.setattr("klero.cli.serve._serve", lambda *given, **_: told.append(given))
    monkeypatch.setattr("klero.cli.serve._leave", lambda code: None)
    run("serve")
    run("serve", *SERVE.split(), KLERO_API_KEY="k")
    (first, of_server, of_engine), (model, options, engine) = told
    assert (first, of_server, model) == ("smollm2", ServerOptions(), "m")
    assert options == ServerOptions(host="0.0.0.0", port=0, max_n=3, keep_alive=2.0, log_prompts=True, api_key="k")
    assert None not in of_engine.values()
    assert engine == of_engine | {
        "max_num_waiting": 5, "scheduling_policy": "priority", "grammar_backend": "xgrammar", "max_answer_bytes": 9,
        "max_num_seqs": 4, "thinking_token_ids": (5, 6),
    }  # fmt: skip
