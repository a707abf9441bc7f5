"""klero generate on a tiny model: where prompts come from, what holds for them, and what comes out."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from klero.cli import generate as command
from klero.cli.app import app
from klero.errors import OptionError, RequestError


@pytest.fixture
def generate(tiny_model):
    """Run `klero generate` on the tiny model, in this process; an error is raised."""

    def run(*arguments, stdin=None):
        given = ["generate", "--model", tiny_model, "--max-tokens", "4", "--num-blocks", "64", *arguments]
        result = CliRunner().invoke(app, given, input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result

    return run


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_text_out(generate):
    result = generate("one", "two", "--seed", "5", "--temperature", "1")
    first, second = result.stdout.split("=== ")[1:]
    assert first.startswith("one\n")
    assert second.startswith("two\n")
    assert "--- length · seed 5 · child 0 · 4 tokens\n" in first
    assert "seed 6" in second
    assert "8 tokens in" in result.stderr


def test_a_line_of_json_says_all(generate):
    (out,) = lines(generate("one", "--json", "--seed", "5"))
    assert (out["prompt"], out["seed"], out["finish_reason"], out["error"]) == ("one", 5, "length", None)
    assert out["reproducible"] is True
    assert len(out["token_ids"]) == 4
    metrics = out["metrics"]
    assert metrics["num_generated_tokens"] == 4
    assert metrics["num_prompt_tokens"] == 3
    assert 0 < metrics["seconds_to_first_token"] <= metrics["seconds_total"]


def test_not_deterministic_is_said(generate):
    assert "not reproducible in other company" in generate("x", "--no-deterministic").stdout
    (out,) = lines(generate("x", "--json", "--no-deterministic"))
    assert out["reproducible"] is False
    assert lines(generate("x", "--json", "--deterministic"))[0]["reproducible"] is True


def test_a_dash_is_standard_input(generate):
    result = generate("before", "-", "after", "--json", stdin="from\nthe pipe\n")
    assert [out["prompt"] for out in lines(result)] == ["before", "from\nthe pipe", "after"]


def test_standard_input_once_and_not_empty(generate):
    with pytest.raises(RequestError, match="read once"):
        generate("-", "-", stdin="x")
    with pytest.raises(RequestError, match="standard input is empty"):
        generate("-", stdin="\n")


@pytest.mark.parametrize("kind, is_read", [("file", True), ("pipe", True), ("null", False)])
def test_what_is_sent_is_read_without_being_asked_for(generate, monkeypatch, tmp_path, kind, is_read):
    if kind == "pipe":
        reading, writing = os.pipe()
        os.write(writing, b"sent\n")
        os.close(writing)
        stream = os.fdopen(reading, "rb")
    else:
        (tmp_path / "sent").write_bytes(b"sent\n")
        stream = open(os.devnull if kind == "null" else tmp_path / "sent", "rb")  # noqa: SIM115  closed below
    from klero.cli import requests

    with stream:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        if is_read:
            assert [one.content for one in requests.read([], None, {}, chat=False)] == ["sent"]
        else:
            with pytest.raises(RequestError, match="no prompt: give one"):
                requests.read([], None, {}, chat=False)


def test_a_file_with_kinds_of_its_own(generate, tmp_path, tiny_model):
    asked = [
        {"prompt": "text", "max_tokens": 2},
        {"prompt_token_ids": [5, 6, 7], "temperature": 1.0, "seed": 9, "n": 2},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "max_tokens": 1},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, asked)))
    text, *ids, talk = lines(generate("--file", str(tmp_path / "in.jsonl"), "--json"))
    assert (text["prompt"], len(text["token_ids"])) == ("text", 2)
    assert [(one["index"], one["seed"]) for one in ids] == [(0, 9), (1, 9)]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"] == [5, 6, 7]
    assert talk["messages"] == asked[2]["messages"]
    assert len(talk["prompt_token_ids"]) == len("<system>s<user>u>")


def test_chat(generate):
    plain, talk = lines(generate("hi", "--json")), lines(generate("hi", "--json", "--chat"))
    assert len(plain[0]["prompt_token_ids"]) == len("hi")
    assert len(talk[0]["prompt_token_ids"]) == len("<user>hi>")
    assert talk[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert generate("hi", "--chat").stdout.startswith("=== hi\n")


def test_chat_wants_texts(generate):
    with pytest.raises(RequestError, match="line 1: prompt_token_ids stands beside --chat"):
        generate("--chat", "--file", "-", stdin='{"prompt_token_ids": [1]}')
    with pytest.raises(RequestError, match=r"prompts\[0\]: .*role"):
        generate("--file", "-", stdin='{"messages": [{"content": "x"}]}')


def test_the_generation_config_only_when_asked(generate):
    with_it, without = generate("x", "--generation-config", "--json"), generate("x", "--json")
    assert "generation config" not in without.stderr
    assert "from the model's generation config: " in with_it.stderr
    assert "temperature=0.7" in with_it.stderr
    assert " repetition_penalty=1.1" in with_it.stderr.partition("not known to klero")[0]
    assert "not known to klero and left out: encoder_repetition_penalty=1.2" in with_it.stderr


def test_options_and_lines_win_over_the_generation_config(tiny_model, monkeypatch):
    seen = []

    class Stop(Exception):
        pass

    def run(llm, prompts, params):
        seen.extend(params)
        raise Stop

    monkeypatch.setattr(command, "_run", run)
    asked = '{"prompt": "a"}\n{"prompt": "b", "max_tokens": 3, "temperature": 0.1}\n{"prompt": "c", "max_tokens": null}'
    given = ["generate", "--model", tiny_model, "--file", "-", "--generation-config", "--top-k", "3", "--seed", "1"]
    assert isinstance(CliRunner().invoke(app, given, input=asked).exception, Stop)
    assert [(p.temperature, p.top_k, p.max_tokens, p.seed) for p in seen] == [
        (0.7, 3, 9, 1),
        (0.1, 3, 3, 2),
        (0.7, 3, None, 3),
    ]


def test_the_engine_options_arrive(generate, monkeypatch):
    import klero.engine

    seen = {}

    class Stop(Exception):
        pass

    def stop(model, **options):
        seen.update(options)
        raise Stop

    monkeypatch.setattr(klero.engine, "LLM", stop)
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 33, "max_model_len": 99, "block_size": 8, "num_blocks": 55}
    given |= {"swap_space": 0.25, "max_microbatch_tokens": 7, "max_microbatch_requests": 2, "threads": 1, "spin": 10}
    options = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), str(value))]
    with pytest.raises(Stop):
        generate("x", *options, "--dtype", "float32", "--no-deterministic", "--no-prefix-caching")
    assert seen == given | {"dtype": "float32", "deterministic": False, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    "words, name, value, unset",
    [
        (["--no-prefix-caching"], "enable_prefix_caching", False, True),
        (["--prefix-caching"], "enable_prefix_caching", True, True),
        (["--swap-space", "0.25"], "swap_space", 0.25, 0),
        (["--max-microbatch-tokens", "7"], "max_microbatch_tokens", 7, None),
        (["--max-microbatch-requests", "2"], "max_microbatch_requests", 2, None),
    ],
)
def test_how_steps_are_batched_reaches_the_engine(generate, monkeypatch, words, name, value, unset):
    from klero.engine import Engine, llm

    seen = []

    class Stop(Exception):
        pass

    class Stopped(Engine):
        def __init__(self, *model, **options):
            super().__init__(*model, **options)
            seen.append(getattr(self.options, name))
            raise Stop

    monkeypatch.setattr(llm, "Engine", Stopped)
    for given in (words, []):
        with pytest.raises(Stop):
            generate("x", *given)
    assert seen == [value, unset]


@pytest.mark.parametrize(
    "words",
    [["--no-prefix-caching"], ["--swap-space", "0.001"], ["--max-microbatch-tokens", "3"],
     ["--max-microbatch-requests", "1"]],
)  # fmt: skip
def test_how_steps_are_batched_changes_no_text(generate, words):
    asked = ["one text", "one text more", "--json", "--seed", "5", "--temperature", "1"]
    plain, other = lines(generate(*asked)), lines(generate(*asked, *words))
    assert [out["token_ids"] for out in plain] == [out["token_ids"] for out in other]


def test_threads_and_spin_in_a_process_of_their_own(tiny_model):
    """They are set before torch is loaded, and over what the command sets by itself."""
    code = """
import os, sys
from klero.cli import main
try:
    main()
finally:
    import torch
    print(os.environ["GOMP_SPINCOUNT"], torch.get_num_threads(), file=sys.stderr)
"""
    asked = ["generate", "x", "--model", tiny_model, "--max-tokens", "1", "--num-blocks", "16"]
    for options, expected in ((["--threads", "1", "--spin", "500"], "500 1"), (["--threads", "2"], "1000 2")):
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        command_line = [sys.executable, "-c", code, *asked, *options]
        done = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=300)
        assert done.stderr.splitlines()[-1] == expected, done.stderr


def test_a_fault_in_an_option_shows_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("klero.cli.options.load", None)
    result = CliRunner().invoke(app, ["generate", "x", "--model", "nowhere", "--top-p", "2"])
    assert "top_p=2.0" in str(result.exception)


def test_a_model_without_a_generation_config():
    from klero.cli import generation_config
    from klero.testing.models import ToyModel

    with pytest.raises(OptionError, match="comes without a generation config"):
        generation_config.of_model(ToyModel())


@pytest.mark.parametrize(
    "config, fields, unknown, idle",
    [
        ({}, {}, {}, {}),
        ({"do_sample": True}, {"temperature": 1.0}, {}, {}),
        ({"do_sample": True, "temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}, {}, {}),
        ({"temperature": 0.5, "top_k": 5}, {}, {}, {"temperature": 0.5, "top_k": 5}),
        ({"max_new_tokens": 7, "min_p": None}, {"max_tokens": 7}, {}, {}),
        ({"num_beams": 4, "max_length": 20}, {}, {"num_beams": 4, "max_length": 20}, {}),
        (
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[4, 5]], "suppress_tokens": [6]},
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_token_ids": [[4, 5], 6]}, {}, {},
        ),
        (
            {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.2},
            {"temperature": 1.0, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.2}, {}, {},
        ),
        ({"typical_p": 0.9, "eta_cutoff": 0.2}, {}, {}, {"typical_p": 0.9, "eta_cutoff": 0.2}),
        ({"guidance_scale": 2.0, "forced_eos_token_id": 0}, {}, {"guidance_scale": 2.0, "forced_eos_token_id": 0}, {}),
        (
            {"eos_token_id": [0, 2], "_from_model_config": True, "output_scores": True, "transformers_version": "5"},
            {}, {}, {},
        ),
    ],
)  # fmt: skip
def test_what_a_generation_config_comes_to(config, fields, unknown, idle):
    from klero.cli import generation_config

    defaults = generation_config.read(config)
    assert (defaults.fields, defaults.unknown, defaults.idle) == (fields, unknown, idle)
    assert all(str(value) in "\n".join(defaults.lines()) for value in [*fields.values(), *unknown.values()])


def test_one_text_on_a_terminal_comes_as_it_is_made(tiny_model):
    """The same text as in one piece, and more than one write."""
    from klero.cli import show
    from klero.cli.requests import Asked
    from klero.engine import LLM

    llm = LLM(tiny_model, num_blocks=32)
    asked = Asked("prompt", "abc", {"max_tokens": 12, "temperature": 1.0, "seed": 3})
    streamed, whole, writes = io.StringIO(), io.StringIO(), []

    class Terminal(io.StringIO):
        def write(self, text):
            writes.append(text)
            return streamed.write(text)

    before = sys.stdout
    try:
        sys.stdout = Terminal()
        (output,) = command._stream(llm, asked, ["abc"], [asked.params({})])
        sys.stdout = whole
        show.print_text(asked, output)
    finally:
        sys.stdout = before
    assert streamed.getvalue() == whole.getvalue()
    assert len(writes) > 12


def test_what_is_said_about_tokens_is_printed_as_json(generate):
    asked = ["one", "--seed", "5", "--temperature", "1", "--top-k", "3", "--logprobs", "2", "--return-probs"]
    (out,) = lines(generate(*asked, "--prompt-logprobs", "0", "--json"))
    assert [entry["token_id"] for entry in out["logprobs"]] == out["token_ids"]
    assert sum(entry["logprob"] for entry in out["logprobs"]) == pytest.approx(out["cumulative_logprob"])
    for entry in out["logprobs"]:
        assert (len(entry["top"]), entry["num_kept"], entry["logprob"]) == (2, 3, entry["raw"])
        kept = dict(zip(entry["kept_ids"], entry["kept_probs"], strict=True))
        assert sum(kept.values()) == pytest.approx(1)
        assert math.log(kept[entry["token_id"]]) == pytest.approx(entry["processed"], abs=1e-5)
    first, *others = out["prompt_logprobs"]
    assert first is None
    assert [entry["token_id"] for entry in others] == out["prompt_token_ids"][1:]
    with pytest.raises(OptionError, match="--json"):
        generate(*asked)


def test_what_is_impossible_is_a_text_in_json(generate):
    (out,) = lines(generate("one", "--temperature", "0", "--logprobs", "2", "--logprobs-mode", "processed", "--json"))
    assert [entry["top"][1][1] for entry in out["logprobs"]] == ["-inf"] * 4


def test_rows_of_logits_are_no_json(generate, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "return_context_logits": true}')
    with pytest.raises(RequestError, match="return_context_logits"):
        generate("--file", str(tmp_path / "in.jsonl"), "--json")


def test_kept_ids_alone_are_printed(generate):
    (out,) = lines(generate("one", "--temperature", "1", "--top-k", "2", "--return-kept", "--json"))
    assert [list(entry) for entry in out["logprobs"]] == [["num_kept", "kept_ids"]] * 4
    assert [entry["num_kept"] for entry in out["logprobs"]] == [2] * 4
    assert [len(entry["kept_ids"]) for entry in out["logprobs"]] == [2] * 4
