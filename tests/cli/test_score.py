"""klero score on a tiny model: what can be scored, what a line says, and what is refused."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from typer.testing import CliRunner

from klero import LLM, SamplingParams
from klero.cli import requests, show
from klero.cli import score as command
from klero.cli.app import app
from klero.errors import RequestError
from klero.evals import Scored


@pytest.fixture
def score(tiny_model):
    """Run `klero score` on the tiny model, in this process; an error is raised."""

    def run(*arguments, stdin=None):
        result = CliRunner().invoke(
            app, ["score", "--model", tiny_model, "--num-blocks", "32", *arguments], input=stdin
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result

    return run


@pytest.fixture
def score_lines(score):
    """The same for a file of lines, each a dict; what comes out, as dicts."""

    def run(*fields):
        return lines(score("--file", "-", stdin="\n".join(map(json.dumps, fields))))

    return run


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def plain(tiny_model):
    """The log-softmax of a plain transformers forward, and the tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)

    def logprobs(ids):
        with torch.inference_mode():
            rows = torch.log_softmax(module(torch.tensor([ids])).logits[0].double(), -1)
        return [None, *(float(rows[i, token]) for i, token in enumerate(ids[1:]))]

    return logprobs, tokenizer


def test_a_text(score, plain):
    logprobs, tokenizer = plain
    text = "Grüße, 你好"
    (line,) = lines(score(text))
    ids = tokenizer.encode(text)
    expected = logprobs(ids)
    assert (line["text"], line["prompt_token_ids"], line["token_ids"]) == (text, [], ids)
    assert line["logprobs"][0] is None
    assert line["logprobs"][1:] == pytest.approx(expected[1:], abs=1e-5)
    assert line["sum"] == pytest.approx(sum(line["logprobs"][1:]), abs=1e-5)
    assert (line["count"], line["is_greedy"], line["error"], line["reproducible"]) == (len(ids) - 1, False, None, True)


def test_a_continuation_counts_alone(score_lines, plain):
    logprobs, tokenizer = plain
    (line,) = score_lines({"prompt": "the sun", "continuation": " is hot"})
    ids = tokenizer.encode("the sun is hot")
    assert list(line)[:2] == ["prompt", "continuation"]
    assert (line["prompt_token_ids"], line["token_ids"]) == (ids[:7], ids[7:])
    assert line["logprobs"] == pytest.approx(logprobs(ids)[7:], abs=1e-5)
    assert line["sum"] == pytest.approx(sum(line["logprobs"]), abs=1e-5)
    assert line["count"] == 7


def test_an_empty_prompt_is_a_text(score_lines):
    pair, text = score_lines({"prompt": "", "continuation": "ab"}, {"text": "ab"})
    assert (pair["logprobs"], pair["count"]) == (text["logprobs"], 1)


def test_where_no_token_counts_nothing_is_claimed(score_lines):
    """Nothing precedes the first token, so it has no logprob: no sum, which 0 would be, and no word about greedy."""
    for line in score_lines({"text": "a"}, {"prompt": "", "continuation": "a"}):
        assert (line["logprobs"], line["count"]) == ([None], 0)
        assert (line["sum"], line["is_greedy"]) == (None, None)


def test_what_generate_printed_is_scored_as_it_is(score, tiny_model):
    options = ["--model", tiny_model, "--num-blocks", "32", "--json", "--logprobs", "0", "--prompt-logprobs", "0"]
    asked = '{"prompt": "the sun"}\n{"prompt_token_ids": [5, 6], "temperature": 0.7, "seed": 1, "n": 2}'
    options += ["--max-tokens", "4", "--ignore-eos"]
    printed = CliRunner().invoke(app, ["generate", "--file", "-", *options], input=asked).stdout
    said, scored = [json.loads(line) for line in printed.splitlines()], lines(score("--file", "-", stdin=printed))
    assert len(said) == len(scored) == 3
    assert {name for line in said for name in line} <= show.GENERATED
    for line, one in zip(said, scored, strict=True):
        assert list(one)[:2] == ["prompt_token_ids", "token_ids"]
        assert "text" not in one
        assert one["token_ids"] == line["token_ids"]
        assert one["logprobs"] == [entry["raw"] for entry in line["logprobs"]]
        assert one["sum"] == pytest.approx(line["cumulative_logprob"], abs=1e-9)


def test_what_generate_said_is_scored_to_the_same_bits(score_lines, tiny_model):
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, logprobs=0, ignore_eos=True)
    (output,) = LLM(tiny_model, num_blocks=32).generate(["the sun"], params)
    drawn = output.outputs[0]
    (line,) = score_lines({"prompt_token_ids": output.prompt_token_ids, "token_ids": drawn.token_ids})
    assert line["token_ids"] == list(drawn.token_ids)
    assert np.array(line["logprobs"], np.float32).tobytes() == drawn.logprobs.raw.tobytes()
    assert line["sum"] == pytest.approx(drawn.cumulative_logprob, abs=1e-9)


def test_a_greedy_continuation_is_told(score_lines, tiny_model):
    (output,) = LLM(tiny_model, num_blocks=32).generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    ids = list(output.outputs[0].token_ids)
    other = [*ids[:2], (ids[2] + 1) % 257]
    same, changed = score_lines(*({"prompt_token_ids": [5, 6, 7], "token_ids": tokens} for tokens in (ids, other)))
    assert (same["is_greedy"], changed["is_greedy"]) == (True, False)


def test_lines_of_standard_input(score, monkeypatch, tmp_path):
    (tmp_path / "texts").write_bytes(b"one\r\n\ntwo words\n")
    monkeypatch.setattr(command, "is_piped", lambda: True)
    assert [line["text"] for line in lines(score(stdin=(tmp_path / "texts").read_bytes()))] == ["one", "two words"]


def test_a_dash_is_standard_input(score):
    assert [line["text"] for line in lines(score("-", stdin="one\ntwo\n"))] == ["one", "two"]
    assert [line["text"] for line in lines(score("a", "-", "b", stdin="one\n\n"))] == ["a", "one", "b"]
    with pytest.raises(RequestError, match="can be read once; it is given more than once"):
        score("-", "-", stdin="x")


def test_the_summary(score):
    said = score("ab", "abc").stderr.splitlines()[-1]
    sums = [line["sum"] for line in lines(score("ab", "abc"))]
    assert said.startswith("2 texts, 3 tokens scored in ")
    assert f": {sum(sums) / 3:.4f} on average, perplexity {math.exp(-sum(sums) / 3):.4g} (and " in said
    assert "1 text, 0 tokens scored" in score("a").stderr


def test_a_failed_text_does_not_enter_the_summary():
    ids, greedy = np.arange(3, dtype=np.int32), np.zeros(3, bool)
    good = Scored(ids, np.array([np.nan, -1, -2], np.float32), greedy, 0, None, True)
    bad = Scored(ids, np.full(3, np.nan, np.float32), greedy, 0, "broken", True)
    assert (
        command._summary([good, bad], 1.0) == "2 texts, 2 tokens scored in 1.00 s: -1.5000 on average, perplexity 4.482"
    )
    line = command._line(bad)
    assert (line["logprobs"], line["sum"], line["error"]) == ([None] * 3, None, "broken")
    assert line["is_greedy"] is None


def test_json_knows_no_infinity():
    ids, greedy = np.arange(3, dtype=np.int32), np.zeros(3, bool)
    line = command._line(Scored(ids, np.array([np.nan, -1, -np.inf], np.float32), greedy, 0, None, True))
    assert (line["logprobs"], line["sum"]) == ([None, -1.0, "-inf"], "-inf")
    json.dumps(line, allow_nan=False)


@pytest.mark.parametrize(
    "written, words",
    [
        ("x", "line 1: not JSON"),
        ('{"text": "a"}\n\n{"txt": "a"}', "line 3: must be an object with text, or prompt and continuation, or"),
        ('{"text": "a", "prompt": "b"}', "and nothing else"),
        ('{"prompt_token_ids": [1], "token_ids": [2], "promt": "b"}', "and nothing else"),
        ('{"prompt": "a"}', "must be an object with"),
        ("[1]", "must be an object with"),
        ('{"text": 5}', "text=5: must be a text"),
        ('{"text": ""}', "text='': is empty, so there is nothing to score"),
        ('{"prompt": "a", "continuation": ""}', "continuation='': is empty"),
        ('{"prompt_token_ids": [1], "token_ids": []}', r"token_ids=\[\]: is empty"),
        ('{"prompt_token_ids": "1", "token_ids": [1]}', "prompt_token_ids='1': must be a list of ids"),
        ("\n", "holds nothing to score"),
    ],
)
def test_lines_that_are_refused_before_anything_is_loaded(written, words, monkeypatch):
    monkeypatch.setattr("klero.cli.options.load", None)
    result = CliRunner().invoke(app, ["score", "--file", "-"], input=written)
    with pytest.raises(RequestError, match=words):
        raise result.exception


def test_all_faults_of_a_file_at_once():
    result = CliRunner().invoke(app, ["score", "--file", "-"], input='x\n{"text": "a"}\n{"text": 1}')
    assert "line 1: " in str(result.exception)
    assert "line 3: " in str(result.exception)


def test_texts_beside_a_file_and_nothing_at_all(monkeypatch):
    with pytest.raises(RequestError, match="stand beside --file"):
        command.read(["x"], "y")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    assert not requests.is_piped()
    with pytest.raises(RequestError, match="no text: give one"):
        command.read([], None)


def test_what_the_model_cannot_take_is_named(score_lines):
    with pytest.raises(RequestError, match=r"prompts\[1\]: .*9999"):
        score_lines({"text": "a"}, {"prompt_token_ids": [1], "token_ids": [9999]})
    with pytest.raises(RequestError, match=r"prompts\[0\]: .*context is 128"):
        score_lines({"text": "a" * 129})
    (full,) = score_lines({"text": "a" * 128})
    assert full["count"] == 127
