"""lm-evaluation-harness's own client of /v1/completions on a live server: the scores of klero's model class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make lm-eval")
pytest.importorskip("fastapi")
pytest.importorskip("tenacity", reason="pip install 'lm-eval[api]' for its clients of servers")
pytest.importorskip("aiohttp", reason="pip install 'lm-eval[api]' for its clients of servers")

from tests.evals.test_harness import PAIRS, evaluate
from tests.server.live import Live

from klero import LLM
from klero.evals import KleroLM

ROOM = 64  # of a window of klero's; the client keeps one token more free, for the one it asks for and leaves out
TEXTS = ["short", "b" * 63, "b" * 64, "many words " * 20, "Grüße aus Köln 你好"]


def asked(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


def client_of(live, tokenizer, **options):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=live.url + "/v1/completions", model="toy", tokenizer=tokenizer, tokenizer_backend="huggingface",
        max_retries=1, timeout=60, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ours(tiny_model):
    return KleroLM(tiny_model, num_blocks=64, max_model_len=ROOM)


@pytest.fixture(scope="module")
def served(tiny_model):
    with Live(lambda: LLM(tiny_model, num_blocks=64, max_model_len=ROOM + 1)) as live:
        yield live
        live.all_free()


WAYS = [{}, {"tokenized_requests": False}, {"batch_size": 4}, {"tokenized_requests": False, "batch_size": 4},
        {"num_concurrent": 8}]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_loglikelihoods_are_those_of_the_model_class_to_the_last_bit(ours, served, tiny_model, way):
    """The harness adds binary64 numbers one by one, and so does the model class: no digit differs."""
    client = client_of(served, tiny_model, max_length=ROOM + 1, **way)
    assert client.loglikelihood(asked(*PAIRS)) == ours.loglikelihood(asked(*PAIRS), disable_tqdm=True)


@pytest.mark.parametrize("way", WAYS[:3], ids=str)
def test_rolling_texts(ours, served, tiny_model, way):
    client = client_of(served, tiny_model, max_length=ROOM + 1, **way)
    texts = asked(*((text,) for text in TEXTS))
    mine = ours.loglikelihood_rolling(texts, disable_tqdm=True)
    assert client.loglikelihood_rolling(texts, disable_tqdm=True) == mine


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_texts_that_are_generated(ours, served, tiny_model, way):
    (text,) = ours.generate_until(asked(("the sun", {"max_gen_toks": 8})), disable_tqdm=True)
    kinds = [{"until": ["\n"], "max_gen_toks": 8}, {"until": [text[2]], "max_gen_toks": 8, "do_sample": False},
             {"until": [], "max_gen_toks": 3, "temperature": 0.0}]  # fmt: skip
    tasks = asked(*((prompt, kind) for kind in kinds for prompt in ("the sun", "w" * 40, "Köln")))
    client = client_of(served, tiny_model, max_length=ROOM + 1, **way)
    assert client.generate_until(tasks) == ours.generate_until(tasks, disable_tqdm=True)


def test_a_greedy_continuation_is_found_out(ours, served, tiny_model):
    contexts = [f"the sun {letter}" for letter in "abcdefghijklmnop"]
    texts = ours.generate_until(asked(*((one, {"max_gen_toks": 1}) for one in contexts)), disable_tqdm=True)
    plain = [(one, text) for one, text in zip(contexts, texts, strict=True) if len(text) == 1 and " " < text < "~"]
    assert plain
    pairs = asked(*plain, *((one, chr(ord(text) ^ 1)) for one, text in plain))
    greedy = [greedy for _, greedy in client_of(served, tiny_model).loglikelihood(pairs)]
    assert greedy == [True] * len(plain) + [False] * len(plain)


def test_what_is_wrong_reaches_the_harness(served, tiny_model):
    client = client_of(served, tiny_model, max_length=2048)
    with pytest.raises(Exception, match="400"):
        client.loglikelihood(asked(("a", "b" * 100)))


@pytest.mark.smollm2
def test_fifty_facts_as_through_the_model_class(tmp_path):
    """The same accuracy, greedy flags and log-likelihoods, of 200 to the last bit."""
    lm = KleroLM("smollm2", dtype="float32", num_blocks=512)
    lm.tokenizer.save_pretrained(tmp_path)
    accuracy, mine = evaluate(lm)
    with Live(lambda: lm.llm) as live:
        accuracy_served, served = evaluate(client_of(live, str(tmp_path), batch_size=16))
    assert 0.5 < accuracy == accuracy_served < 0.95
    assert sum(len(item) for item in mine) == 200
    assert mine == served
