"""The model class of lm-evaluation-harness, beside the harness's own transformers model."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from klero import LLM, SamplingParams
from klero.errors import ModelError, OptionError, ParameterError, RequestError
from klero.testing.models import ToyModel

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make lm-eval")

FACTS = Path(__file__).resolve().parents[1] / "data" / "facts"


def asked(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.fixture(scope="module")
def ours(tiny_model):
    from klero.evals import KleroLM

    return KleroLM(tiny_model, num_blocks=64, max_model_len=64)


@pytest.fixture(scope="module")
def theirs(ours, tiny_model):
    """The harness's own, on a copy of the weights. A window of klero's holds the token it scores last, theirs does
    not: so their length is one less."""
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(tiny_model, dtype="float32", device="cpu", batch_size=3, max_length=ours.max_length - 1)
    lm.model.generation_config = type(lm.model.generation_config)(eos_token_id=0)  # its penalties would act unasked
    return lm


PAIRS = [
    ("the sun", " is hot"), ("the sun", " is cold"), ("", "an empty context"), ("trailing space ", "here"), ("x", "y"),
    ("Grüße aus", " Köln 你好"), ("a", "a" * 40), ("c" * 50, "d" * 14),
]  # fmt: skip


def test_loglikelihoods_are_the_harness_s_own(ours, theirs):
    mine, other = (lm.loglikelihood(asked(*PAIRS), disable_tqdm=True) for lm in (ours, theirs))
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in other], abs=1e-4)


def test_a_greedy_continuation_is_found_out(ours):
    """Of contexts whose greedy token is a letter or the like: other bytes are no text of their own."""
    contexts = [f"the sun {letter}" for letter in "abcdefghijklmnop"]
    texts = ours.generate_until(asked(*((one, {"max_gen_toks": 1}) for one in contexts)), disable_tqdm=True)
    plain = [(one, text) for one, text in zip(contexts, texts, strict=True) if len(text) == 1 and " " < text < "~"]
    assert plain
    pairs = asked(*plain, *((one, chr(ord(text) ^ 1)) for one, text in plain))
    greedy = [greedy for _, greedy in ours.loglikelihood(pairs, disable_tqdm=True)]
    assert greedy == [True] * len(plain) + [False] * len(plain)


def test_rolling_texts_of_any_length(ours, theirs):
    texts = asked(("short",), ("b" * 63,), ("b" * 64,), ("many words " * 20,), ("",))
    mine = ours.loglikelihood_rolling(texts, disable_tqdm=True)
    assert mine == pytest.approx(theirs.loglikelihood_rolling(texts, disable_tqdm=True), abs=1e-3)
    assert mine[-1] == 0


def test_a_context_that_is_too_long_loses_its_beginning(ours, caplog):
    with caplog.at_level(logging.WARNING):
        long, short = ours.loglikelihood(asked(("z" * 99 + "e" * 60, "fghi"), ("e" * 60, "fghi")), disable_tqdm=True)
    assert long == short
    assert "a context of 159 tokens is cut to its last 60" in caplog.text
    with pytest.raises(RequestError, match="64 tokens and one before it do not fit into 64"):
        ours.loglikelihood(asked(("a", "b" * 64)), disable_tqdm=True)


def test_texts_that_are_generated(ours, theirs):
    tasks = asked(("the sun", {"until": ["\n"], "max_gen_toks": 8}), ("w" * 60, {"until": "q", "max_gen_toks": 10}))
    mine = ours.generate_until(tasks, disable_tqdm=True)
    assert mine == theirs.generate_until(tasks, disable_tqdm=True)
    stopped = ours.generate_until(asked(("the sun", {"until": [mine[0][2], ""], "max_gen_toks": 8})), disable_tqdm=True)
    assert stopped == [mine[0][: mine[0].index(mine[0][2])]]
    with pytest.raises(RequestError, match="max_gen_toks=64: must be less than the context, 64"):
        ours.generate_until(asked(("x", {"max_gen_toks": 64})), disable_tqdm=True)


def test_nothing_asked_nothing_answered(ours):
    assert ours.loglikelihood([]) == ours.loglikelihood_rolling([]) == ours.generate_until([]) == []


@pytest.mark.parametrize(
    "kwargs, fields",
    [
        ({}, {"temperature": 0, "max_tokens": 256}),
        ({"until": "\n", "max_gen_toks": 5}, {"temperature": 0, "stop": ["\n"], "max_tokens": 5}),
        ({"until": ["a", ""], "max_new_tokens": 7}, {"temperature": 0, "stop": ["a"], "max_tokens": 7}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9, "max_tokens": 256}),
        ({"do_sample": True, "top_k": 5, "seed": 3}, {"temperature": 1, "top_k": 5, "seed": 3, "max_tokens": 256}),
        ({"temperature": 0.7, "max_tokens": 9}, {"temperature": 0.7, "max_tokens": 9}),
        ({"top_p": 0.9}, {"temperature": 0, "top_p": 0.9, "max_tokens": 256}),
    ],
)
def test_what_a_task_asks_for(kwargs, fields):
    from klero.evals.harness import generation_params

    given = dict(kwargs)
    assert generation_params(kwargs, 256) == SamplingParams(**fields)
    assert kwargs == given


def test_what_klero_does_not_know_is_refused():
    from klero.evals.harness import generation_params

    with pytest.raises(ParameterError, match="num_groups=4"):
        generation_params({"num_groups": 4}, 256)


def test_requests_that_draw_repeat_with_the_model_s_seed(tiny_model):
    from klero.evals import KleroLM

    tasks = asked(*[("x", {"do_sample": True, "max_gen_toks": 8})] * 2)
    first, second = (KleroLM(tiny_model, num_blocks=16).generate_until(tasks, disable_tqdm=True) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    assert KleroLM(tiny_model, num_blocks=16, seed=1).generate_until(tasks, disable_tqdm=True) != first


def test_options_act_or_are_refused(tiny_model):
    from klero.evals import KleroLM

    sizes = [
        KleroLM(tiny_model, num_blocks=16, **given).llm.engine.sampler.slots.num_slots
        for given in ({}, {"batch_size": 3}, {"batch_size": "auto:4", "max_batch_size": 5}, {"max_num_seqs": 2})
    ]
    assert sizes == [64, 3, 5, 2]
    with pytest.raises(OptionError, match="device='cuda'"):
        KleroLM(tiny_model, device="cuda")
    with pytest.raises(OptionError, match="batch_size='many'"):
        KleroLM(tiny_model, batch_size="many")
    with pytest.raises(OptionError, match="comes without a tokenizer"):
        KleroLM(ToyModel(vocab_size=8))
    llm = LLM(tiny_model, num_blocks=16)
    assert KleroLM(llm, device="cpu").llm is llm
    with pytest.raises(OptionError, match="batch_size, dtype: the LLM is made already"):
        KleroLM(llm, batch_size=1, dtype="float32")


def test_the_token_before_everything(tiny_model):
    from klero.evals import KleroLM

    assert KleroLM(tiny_model, num_blocks=16).prefix_token_id == 0
    assert KleroLM(tiny_model, num_blocks=16, prefix_token_id=5).prefix_token_id == 5


def test_a_conversation_goes_through_the_template(ours):
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "<user>hi>"
    assert ours.tokenizer_name


def test_a_model_that_fails_ends_the_evaluation(ours, monkeypatch):
    import numpy as np

    def fail(step):
        return np.full((len(step.logits_rows), ours.llm.engine.model.vocab_size), np.nan, np.float32)

    monkeypatch.setattr(ours.llm.engine.model, "forward", fail)
    with pytest.raises(ModelError, match=r"request 0 of the evaluation failed: .*NaN"):
        ours.loglikelihood(asked(("a", "b")), disable_tqdm=True)
    with pytest.raises(ModelError, match=r"request 0 of the evaluation failed: .*NaN"):
        ours.generate_until(asked(("a", {"max_gen_toks": 2})), disable_tqdm=True)


def evaluate(lm):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = TaskManager(include_path=str(FACTS), include_defaults=False)
    results = simple_evaluate(lm, tasks=["facts"], task_manager=found, bootstrap_iters=0)
    samples = sorted(results["samples"]["facts"], key=lambda sample: sample["doc_id"])
    return results["results"]["facts"]["acc,none"], [sample["filtered_resps"] for sample in samples]


@pytest.mark.smollm2
def test_fifty_facts_as_through_the_harness_s_own_model():
    """Same accuracy, same greedy flags, log-likelihoods within 1e-3."""
    from lm_eval.models.huggingface import HFLM

    from klero.evals import KleroLM

    lm = KleroLM("smollm2", dtype="float32", num_blocks=512)
    accuracy, mine = evaluate(lm)
    module = lm.llm.engine.model.module
    lm.llm.close()  # gives the module its own attention back
    accuracy_theirs, theirs = evaluate(HFLM(module, tokenizer=lm.tokenizer, batch_size=16))
    assert accuracy == accuracy_theirs
    assert 0.5 < accuracy < 0.95
    assert len(mine) == len(theirs) == 50
    values, others = ([value for item in responses for value, _ in item] for responses in (mine, theirs))
    assert len(values) == 200
    assert values == pytest.approx(others, abs=1e-3, rel=0)
    flags, others = ([greedy for item in responses for _, greedy in item] for responses in (mine, theirs))
    assert flags == others


def test_the_command_knows_klero(tiny_model, monkeypatch, capsys):
    from klero.evals import __main__ as command

    monkeypatch.setattr("sys.argv", [
        "x", "run", "--model", "klero", "--model_args", f"pretrained={tiny_model},num_blocks=512", "--tasks", "facts",
        "--include_path", str(FACTS), "--limit", "2",
    ])  # fmt: skip
    command.main()
    said = capsys.readouterr().out
    assert "|facts|" in said.replace(" ", "")
    assert "batch_size: auto" in said
