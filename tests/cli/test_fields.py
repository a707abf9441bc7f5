"""The options that are fields of SamplingParams: each one reaches its field, and text becomes ids and pairs."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import typer
from typer.testing import CliRunner

from klero import SamplingParams
from klero.cli import fields, requests
from klero.cli import generate as command
from klero.cli.app import app
from klero.cli.options import marks_of
from klero.errors import OptionError, ParameterError, RequestError

NUMBERS = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.6, "min_p": 0.1, "seed": 3, "top_n_sigma": 1.5, "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02, "top_a": 0.2, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.2,
    "top_p_decay": 0.9, "top_p_min": 0.3, "top_p_reset_id": 5, "repetition_penalty": 1.5, "presence_penalty": -0.5,
    "frequency_penalty": 0.25, "prompt_ignore_length": 2, "no_repeat_ngram_size": 3,
}  # fmt: skip
LISTS = ["--logit-bias", "4=-1.5", "--logit-bias", "2=-inf", "--bad-token-ids", "5", "--bad-token-ids", "6,7"]
LISTS += ["--allowed-token-ids", "1,4", "--allowed-token-ids", "8", "--bad-words", "red", "--bad-words", "a, b"]
READ = {
    "logit_bias": [(4, -1.5), (2, -float("inf"))], "bad_token_ids": [[5], [6, 7]], "allowed_token_ids": [1, 4, 8],
    "bad_words": ["red", "a, b"],
}  # fmt: skip


def run(*arguments):
    """Run a command in this process; an error is raised."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_option_reaches_its_field(monkeypatch):
    class Stop(Exception):
        pass

    seen = {}

    def read(prompts, file, given, *, chat):
        seen.update(given)
        raise Stop

    monkeypatch.setattr(command, "read", read)
    options = [text for name, value in NUMBERS.items() for text in ("--" + name.replace("_", "-"), str(value))]
    with pytest.raises(Stop):
        run("generate", "x", *options, *LISTS)
    given = {name: value for name, value in seen.items() if name in fields.SHAPING or name in NUMBERS | READ}
    assert given == NUMBERS | READ
    tables = fields.SHAPING | fields.SEED | fields.FILTERS | fields.REWRITING | fields.BAD_WORDS
    assert set(tables) == set(NUMBERS | READ)  # no option is left out here
    assert SamplingParams.from_dict(given).asked().keys() == given.keys()


def test_what_is_said_about_a_token_reaches_its_fields():
    seen = []
    one = typer.Typer()

    @one.command()
    @fields.takes(fields.LOGPROBS)
    def command(**given: object):
        seen.append(given)

    options = ["--logprobs", "0", "--prompt-logprobs", "-1", "--logprobs-mode", "processed", "--return-kept"]
    options += ["--return-probs", "--logprob-token-ids", "5,3", "--logprob-token-ids", "4"]
    for arguments in ([], options):
        assert CliRunner().invoke(one, arguments).exit_code == 0
    asked = {"logprobs": 0, "prompt_logprobs": -1, "logprobs_mode": "processed", "return_kept": True}
    asked |= {"return_probs": True, "logprob_token_ids": [5, 3, 4]}
    assert seen == [{}, asked]
    assert set(asked) | set(requests.ROWS) == set(fields.LOGPROBS)  # no option is left out here
    assert SamplingParams.from_dict(asked).asked().keys() == asked.keys()
    assert isinstance(CliRunner().invoke(one, ["--logprob-token-ids", "5;3"]).exception, OptionError)


TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
STRUCTURED = [  # options, with a file's text in the place of its name; what they come to
    (["--json-schema", '{"type": "object"}\n'], {"json": '{"type":"object"}'}),
    (["--json-schema", "true", "--json-whitespace", "2"], {"json": "true", "json_whitespace": 2}),
    (["--json-object", "--json-whitespace", "0"], {"json_object": True}),
    (["--regex", "a,b+"], {"regex": "a,b+"}),
    (["--choice", "yes,no"], {"choice": ("yes", "no")}),
    (["--choice", "yes", "--choice", '"no, never", it "is"'], {"choice": ("yes", "no, never", ' it "is"')}),
    (["--grammar", 'root ::= "a"\n'], {"grammar": 'root ::= "a"\n'}),
    (["--structural-tag", json.dumps(TAGS)], {"structural_tag": json.dumps(TAGS, separators=(",", ":"))}),
    (["--thinking-token-budget", "0", "--regex", "a"], {"thinking_token_budget": 0, "regex": "a"}),
]


@pytest.mark.parametrize("options, asked", STRUCTURED, ids=str)
def test_what_text_may_come_reaches_its_fields(options, asked, tmp_path):
    seen = []
    one = typer.Typer()

    @one.command()
    @fields.takes(fields.STRUCTURED)
    def command(**given: object):
        seen.append(given)

    given = list(options)
    if given[0] in ("--json-schema", "--grammar", "--structural-tag"):
        (tmp_path / "file").write_text(given[1])
        given[1] = str(tmp_path / "file")
    for arguments in ([], given):
        assert CliRunner().invoke(one, arguments).exit_code == 0
    assert seen[0] == {}
    assert SamplingParams.from_dict(seen[1]).asked() == asked


def test_no_option_of_structured_output_is_left_out_above():
    assert {name for _, asked in STRUCTURED for name in asked} == set(fields.STRUCTURED)


@pytest.mark.parametrize("option", ["--json-schema", "--grammar", "--structural-tag"])
def test_a_file_that_cannot_be_read_is_an_error_before_any_model_is_loaded(option, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in (tmp_path / "nowhere", tmp_path, tmp_path / "bytes"):
        with pytest.raises(OptionError, match=f"^{option} {name}: cannot be read"):
            run("generate", "x", option, str(name))


@pytest.mark.parametrize(
    "options, error, words",
    [
        (["--choice", '"a" b'], OptionError, "--choice '\"a\" b': must be texts with commas between them"),
        (["--choice", "a,,b"], ParameterError, "must be a list of 1 to 10000 different non-empty strings"),
        (["--choice", "a", "--choice", "a"], ParameterError, "'a' is there twice"),
        (["--regex", "a", "--json-object"], ParameterError, "stands beside json_object"),
        (["--regex", "a", "--json-whitespace", "1"], ParameterError, "means nothing without json, json_object"),
        (["--regex", "a", "--ignore-eos"], ParameterError, "leaves nothing that may come at the end of regex"),
        (["--thinking-token-budget", "-1"], ParameterError, "must be an integer >= 0"),
    ],
    ids=str,
)
def test_what_breaks_a_rule_of_structured_output(options, error, words):
    with pytest.raises(error) as raised:
        run("generate", "x", *options)
    assert words in str(raised.value)


def test_a_schema_comes_in_a_json_line(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": "x", "guided_json": {"b": [1], "a": {}}, "json_whitespace": 1}))
    (one,) = requests.read([], str(file), {}, chat=False)
    assert one.params({}).json == '{"b":[1],"a":{}}'
    with pytest.raises(RequestError, match="line 1: regex='a': stands beside json"):
        requests.read([], str(file), {"regex": "a"}, chat=False)


def test_marks_of_thinking_are_two():
    assert marks_of("5,<end>") == (5, "<end>")
    for text in ("5", "5,", ",5", "", "1,2,3"):
        with pytest.raises(OptionError, match=f"^--thinking-token-ids '{text}': must be START,END"):
            marks_of(text)


@pytest.mark.parametrize("option", ["--return-context-logits", "--return-generation-logits"])
def test_rows_of_numbers_are_not_printed(option):
    with pytest.raises(OptionError, match=f"{option}: is rows of numbers, too many to print; ask klero.LLM in Python"):
        run("generate", "x", option)
    assert option not in run("generate", "--help")


def test_what_is_not_given_is_no_field():
    assert fields.read_fields(dict.fromkeys(fields.SHAPING) | {"logit_bias": [], "top_k": 0}) == {"top_k": 0}


def test_every_option_is_a_field_of_its_name():
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    tables = (fields.SHAPING, fields.SEED, fields.FILTERS, fields.REWRITING, fields.BAD_WORDS, fields.LOGPROBS)
    tables += (fields.STRUCTURED,)
    assert known >= {name for table in tables for name in table}


@pytest.mark.parametrize(
    "options, words",
    [
        (["--logit-bias", "4"], "--logit-bias '4': must be ID=NUMBER"),
        (["--logit-bias", "x=1"], "--logit-bias 'x=1': must be ID=NUMBER"),
        (["--bad-token-ids", "5,x"], "--bad-token-ids '5,x': must be token ids with commas"),
        (["--allowed-token-ids", "1;2"], "--allowed-token-ids '1;2': must be token ids with commas"),
        (["--prompt-ids", "a"], "--prompt-ids 'a': must be token ids with commas"),
    ],
)
def test_text_that_is_no_id_is_an_error(options, words):
    with pytest.raises(OptionError) as raised:
        run("explain", "1,2", *options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--logit-bias", "1=nan"], "logit_bias="),
        (["--logit-bias", "1=1", "--logit-bias", "1=2"], "1 is there twice"),
        (["--allowed-token-ids", ""], "at least one token id"),
        (["--allowed-token-ids", "1", "--bad-token-ids", "1"], "allows nothing"),
        (["--bad-token-ids", "2"], "bad_token_ids"),
        (["--output-ids", "2", "--presence-penalty", "1"], "must be a list of token ids in [0, 1]: the logits"),
        (["--top-p-min", "0.1"], "means nothing without top_p_decay"),
    ],
)
def test_a_rule_of_the_fields_holds_for_options(options, words):
    with pytest.raises(ParameterError) as raised:
        run("explain", "1,2", *options)
    assert words in str(raised.value)


def test_explain_shows_what_rewrites():
    said = run(
        "explain", "2,-1,0.5,3", "--prompt-ids", "0", "--output-ids", "0,0,1", "--repetition-penalty", "1.5",
        "--bad-token-ids", "3", "--temperature", "1", "--seed", "1",
    )  # fmt: skip
    assert said.splitlines() == [
        "stage               changed   tokens      mass",
        "repetition_penalty        2        4",
        "bad_token_ids             1        3",
        "logits                             3  1.000000",
        "-> token 0   seed 1, position 4, child 0",
        "kept: 0 1 2",
    ]


def test_explain_shows_the_mask():
    told = ["--prompt-ids", "0", "--output-ids", "1", "--min-tokens", "8", "--end-token-ids", "2"]
    assert run("explain", "9,8,7,6", "--mask-ids", "2,3", *told).splitlines() == [
        "stage              changed   tokens      mass",
        "grammar and masks        2        2",
        "min_tokens               1        1",
        "logits                            1  1.000000",
        "greedy                            1  1.000000",
        "-> token 3   no seed, position 2, child 0",
        "kept: 3",
    ]
    assert "-> token 2 " in run("explain", "9,8,7,6", "--mask-ids", "2", *told)  # the end alone: min_tokens yields
    assert "after the bans of grammar and masks" in run("explain", "9,8", "--mask-ids", "")
    for ids in ("4", "-1,2", "2,40"):
        with pytest.raises(OptionError, match=rf"--mask-ids '{ids}': must be in \[0, 3\], the columns of the logits"):
            run("explain", "9,8,7,6", "--mask-ids", ids)
    with pytest.raises(ParameterError, match="min_tokens=8: bans the model's end ids; give end_token_ids="):
        run("explain", "9,8,7,6", "--min-tokens", "8")


def test_the_position_of_explain_follows_the_history_unless_it_is_given():
    assert "position 0," in run("explain", "1,2")
    assert "position 3," in run("explain", "1,2", "--prompt-ids", "1,0", "--output-ids", "1")
    assert "position 9," in run("explain", "1,2", "--prompt-ids", "1,0", "--position", "9")


def test_the_decay_of_explain_follows_the_output():
    decay = ["--top-p", "0.9", "--top-p-decay", "0.5", "--top-p-min", "0.1", "--seed", "1"]
    assert "kept: 0 1 2\n" in run("explain", "1,1,0.5", *decay)
    assert "kept: 0\n" in run("explain", "1,1,0.5", *decay, "--output-ids", "2,2")


@pytest.mark.parametrize("name", ["filters", "logits_processors", "logits_processor"])
def test_callables_cannot_come_as_json(tmp_path, name):
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": "x", name: ["mine"]}))
    with pytest.raises(RequestError, match=r"line 1: .*is a callable, which JSON cannot bring; give it to klero.LLM"):
        requests.read([], str(file), {}, chat=False)
    file.write_text(json.dumps({"prompt": "x", name: None}))
    assert len(requests.read([], str(file), {}, chat=False)) == 1


def test_json_lines_take_every_field_that_is_no_callable(tmp_path):
    asked = {"logit_bias": {"5": -1, "6": -float("inf")}, "embedding_bias": [0.5, 1], "bad_words": "red"}
    asked["bad_token_ids"] = [3, [4, 5]]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "x", "allowed_token_ids": [1]} | asked))
    (one,) = requests.read([], str(tmp_path / "in.jsonl"), {"presence_penalty": 1.0}, chat=False)
    params = one.params({})
    assert params.logit_bias == ((5, -1.0), (6, -float("inf")))
    assert params.bad_token_ids == ((3,), (4, 5))
    assert (params.bad_words, params.allowed_token_ids, params.presence_penalty) == (("red",), (1,), 1.0)
    assert params.embedding_bias.array.tolist() == [0.5, 1.0]


def test_generate_takes_them(tiny_model):
    """The tokenizer's ids are single bytes: a ban, a bias and an allowed set change the text."""
    base = ["generate", "x", "--model", tiny_model, "--max-tokens", "5", "--num-blocks", "32", "--json", "--ignore-eos"]

    def ids(*options):
        return json.loads(run(*base, *options))["token_ids"]

    assert ids("--allowed-token-ids", "70,71", "--no-repeat-ngram-size", "2", "--logit-bias", "70=100")[:2] == [70, 70]
    assert set(ids("--allowed-token-ids", "70,71", "--logit-bias", "70=-inf")) == {71}
    plain = ids()
    assert plain[0] not in ids("--bad-token-ids", str(plain[0]))


def test_generate_writes_what_may_come(tiny_model, tmp_path):
    """A random model of single bytes writes what it is told to, and ends by itself."""
    pytest.importorskip("llguidance")
    base = ["generate", "x", "--model", tiny_model, "--max-tokens", "40", "--num-blocks", "32", "--json"]
    base += ["--temperature", "1.5", "--seed", "3"]
    (tmp_path / "schema").write_text('{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}')
    (tmp_path / "grammar").write_text('root ::= "<" [0-9]+ ">"')
    for options, pattern in [
        (["--choice", "yes,no"], "yes|no"),
        (["--choice", "yes", "--min-tokens", "30"], "yes"),  # min_tokens yields to the grammar
        (["--regex", "[ab]{3}"], "[ab]{3}"),
        (["--json-schema", str(tmp_path / "schema")], r'\{"a":[12].*'),
        (["--grammar", str(tmp_path / "grammar")], "<[0-9]+>?"),
        (["--regex", "a", "--thinking-token-budget", "2", "--thinking-token-ids", "[,]"], r"a|\[.{0,2}\]a"),
    ]:
        said = json.loads(run(*base, *options))
        assert re.fullmatch(pattern, said["text"], re.DOTALL), said
        assert said["finish_reason"] == "stop" or len(said["token_ids"]) == 40
