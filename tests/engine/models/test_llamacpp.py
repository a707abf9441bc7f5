"""llama.cpp behind klero's engine: against a strict fake of its API everywhere, and for real where it is installed.

The fake's logits are those of ToyModel, so an engine on it must say what an engine on ToyModel says.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.models.fake_llamacpp import FakeLlamaCpp

from klero import LLM, SamplingParams
from klero.engine import Engine
from klero.engine.models import llamacpp, load_model
from klero.engine.models.llamacpp import LlamaCppModel
from klero.engine.models.protocol import Model
from klero.errors import MissingExtra, ModelError
from klero.testing.models import ToyModel

have_package = importlib.util.find_spec("llama_cpp") is not None


@contextmanager
def in_place(fake):
    """The fake in the place of llama_cpp."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "llama_cpp", fake)
        patch.setattr(llamacpp, "_keep", {})
        yield fake
        gc.collect()  # what it lent comes back while it is there


@pytest.fixture
def use():
    with ExitStack() as stack:
        yield lambda fake: stack.enter_context(in_place(fake))


@pytest.fixture
def fake(use):
    return use(FakeLlamaCpp())


@pytest.fixture
def file(tmp_path):
    def write(name="toy.gguf", **about):
        path = tmp_path / name
        path.write_bytes(b"GGUF" + json.dumps(about).encode())
        return path

    return write


PARAMS = [
    SamplingParams(max_tokens=9),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=7),
    SamplingParams(temperature=1.5, min_p=0.05, seed=2**64 - 1, max_tokens=11),
    SamplingParams(temperature=1.0, top_k=5, seed=8, n=3, max_tokens=5),
    SamplingParams(temperature=2.0, seed=0, max_tokens=13),
]
PROMPTS = [[1], [2, 3, 4, 5, 6, 7, 8], [9] * 20, [10, 11], [12, 13, 14]]


def run(engine: Engine, indexes):
    """The ids of every choice of the requests, added two at a time while others run."""
    waiting, outputs = list(indexes), {}
    while waiting or engine.num_unfinished:
        for i in waiting[:2]:
            engine.add_request(str(i), PROMPTS[i], PARAMS[i])
        del waiting[:2]
        outputs |= {int(o.request_id): [choice.token_ids for choice in o.outputs] for o in engine.step()}
    return outputs


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "plain.gguf"
    path.write_bytes(b"GGUF")
    return path


@given(
    order=st.permutations(range(5)),
    max_num_seqs=st.integers(1, 12),
    budget=st.sampled_from([1, 3, 16, 64]),
    num_tokens=st.sampled_from([1, 5, 64, 2048]),
    batch_size=st.sampled_from([1, 2, 7, 64]),
)
def test_the_engine_says_what_it_says_on_the_toy_model(plain, order, max_num_seqs, budget, num_tokens, batch_size):
    """Joins, leaves, n > 1, mixed parameters, growing pools, and steps longer than a batch."""
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    expected = run(Engine(ToyModel(end_token_ids=[0]), **options), order)
    with in_place(FakeLlamaCpp()) as fake:
        model = LlamaCppModel(plain, num_tokens=num_tokens, batch_size=batch_size, threads=1)
        assert run(Engine(model, **options), order) == expected
        assert max(fake.decoded) <= batch_size
        (context,) = fake.contexts.values()
        assert context["held"] == {}


def test_it_is_a_model_and_frees_what_it_took(fake, file):
    model = LlamaCppModel(file(), threads=1)
    assert isinstance(model, Model)
    assert (model.vocab_size, model.max_model_len, model.end_token_ids) == (64, 256, (0,))
    assert not model.uses_blocks
    assert not model.deterministic
    run(Engine(model, max_num_seqs=12), range(5))
    del model
    gc.collect()
    assert not fake.contexts
    assert not fake.models
    assert not fake.batches


def test_the_pool_grows_only_as_far_as_it_must(fake, file):
    model = LlamaCppModel(file(), num_tokens=32, threads=1)
    engine = Engine(model)
    run(engine, [0, 1])
    assert [c["n_ctx"] for c in fake.contexts.values()] == [32]
    engine.add_request("long", [9] * 20, SamplingParams(max_tokens=20, ignore_eos=True))
    until_done(engine)
    assert [c["n_ctx"] for c in fake.contexts.values()] == [64]


def test_abort_frees_the_sequence(fake, file):
    engine = Engine(LlamaCppModel(file(), threads=1), max_num_seqs=1)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=50, temperature=1.0, seed=1))
    for _ in range(4):
        engine.step()
    (context,) = fake.contexts.values()
    assert list(context["held"]) == [0]
    assert len(engine.abort("a").outputs[0].token_ids) == 4
    assert context["held"] == {}
    assert run(engine, [1]) == run(Engine(ToyModel(end_token_ids=[0])), [1])


def test_rows_of_any_tokens_in_the_order_asked(fake, file, packer):
    """More than one row of a sequence, and rows out of order; the copy outlives the next step."""
    model, toy = LlamaCppModel(file(), threads=1, batch_size=3), ToyModel()
    p = packer(8, 4)
    p.join(0)
    p.join(5)
    step = p.step([(0, np.arange(4)), (5, np.arange(7))])
    step.logits_rows[:] = step.logits_rows[::-1].copy()
    rows, expected = model.forward(step), toy.forward(step)
    again = p.step([(5, np.arange(2))], every_row=False)
    np.testing.assert_array_equal(model.forward(again), toy.forward(again))
    np.testing.assert_array_equal(rows, expected)


def test_a_step_that_asks_for_no_row(fake, file, packer):
    model = LlamaCppModel(file(), threads=1)
    p = packer(8, 4)
    p.join(0)
    step = p.step([(0, np.arange(4))])
    object.__setattr__(step, "logits_rows", np.zeros(0, np.int64))
    assert model.forward(step).shape == (0, 64)
    assert model.forward(p.step([(0, np.arange(1))])).shape == (1, 64)


@pytest.mark.parametrize("code", [-1, -3, 2])
def test_a_failed_step_names_the_code_and_runs_again(fake, file, code):
    engine = Engine(LlamaCppModel(file(), threads=1))
    engine.add_request("1", PROMPTS[1], PARAMS[1])
    engine.step()
    fake.fail_with = code
    with pytest.raises(ModelError, match=rf"failed with code {code} on a step of 1 tokens \(told to fail\)"):
        engine.step()
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    assert [outputs[0].outputs[0].token_ids] == run(Engine(ToyModel(end_token_ids=[0])), [1])[1]


def test_no_room_leaves_the_sequences_alone(use, file):
    fake = use(FakeLlamaCpp(max_cells=40))
    engine = Engine(LlamaCppModel(file(), num_tokens=32, threads=1))
    engine.add_request("1", PROMPTS[1], PARAMS[1])
    engine.step()
    engine.add_request("2", [9] * 30, SamplingParams(max_tokens=4))
    with pytest.raises(ModelError, match=r"cannot make a context of 64 tokens for 8 sequences \(failed to allocate.*"):
        engine.step()
    assert len(fake.contexts) == 1
    engine.abort("2")
    (output,) = until_done(engine)
    assert [output.outputs[0].token_ids] == run(Engine(ToyModel(end_token_ids=[0])), [1])[1]


def until_done(engine):
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    return outputs


def test_a_pool_that_holds_every_context_and_has_no_room_is_an_error(use, file, monkeypatch):
    fake = use(FakeLlamaCpp())
    model = LlamaCppModel(file(n_ctx_train=16), num_tokens=16 * 8, threads=1)
    monkeypatch.setattr(fake, "llama_decode", lambda context, batch: 1)
    engine = Engine(model)
    engine.add_request("0", [1], SamplingParams(max_tokens=1))
    with pytest.raises(ModelError, match="no room for a step of 1 tokens in a context of 128 tokens for 8 sequences"):
        engine.step()


def test_more_sequences_than_llama_cpp_has(use, file):
    use(FakeLlamaCpp(max_seqs=10))
    engine = Engine(LlamaCppModel(file(), threads=1), max_num_seqs=11)
    engine.add_request("x", [1], SamplingParams(n=11, temperature=1.0, max_tokens=2))
    with pytest.raises(ModelError, match=r"max_num_seqs: llama\.cpp runs 10 sequences at a time, and this step has 11"):
        engine.step()


def test_threads_are_those_of_klero_unless_named(fake, file, monkeypatch, packer):
    monkeypatch.setenv("KLERO_NUM_THREADS", "3")
    p = packer(8, 4)
    p.join(0)
    free, fixed = LlamaCppModel(file()), LlamaCppModel(file(), threads=2)
    assert [c["n_threads"] for c in fake.contexts.values()] == [3, 2]
    monkeypatch.setenv("KLERO_NUM_THREADS", "5")
    for model in (free, fixed):
        step = p.step([(0, np.arange(1))])
        step.positions[:] = 0
        model.forward(step)
    assert [(c["n_threads"], c["n_threads_batch"]) for c in fake.contexts.values()] == [(5, 5), (2, 2)]


def test_two_sets_of_rotary_factors_keep_the_pool_above_the_border(fake, file):
    model = LlamaCppModel(file(meta={"toy.rope.scaling.original_context_length": "4096"}), threads=1)
    assert model._context.num_tokens > 4096
    model = LlamaCppModel(file(meta={"toy.rope.scaling.original_context_length": "4096"}), num_tokens=8000, threads=1)
    assert model._context.num_tokens == 8000


PIECES = ["<s>", "</s>", "a", "b", " c", "é", "x" * 100, "user", ":", ";"]


def words(file, **about):
    return file(pieces=PIECES, control=[0, 1], eog=[1], bos=0, **about)


def test_texts_through_llm(fake, file):
    llm = LLM(f"llama.cpp:{words(file, add_bos=True)}", max_num_seqs=4)
    toy = ToyModel(vocab_size=10, end_token_ids=[1])
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, min_tokens=12)
    (output,) = llm.generate(["ab c"], params)
    (expected,) = LLM(toy).generate([[0, 2, 3, 4]], params)
    assert output.prompt_token_ids == (0, 2, 3, 4)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].text == "".join(PIECES[i] for i in output.outputs[0].token_ids if i > 1)


def test_the_tokenizer(fake, file):
    model, tokenizer = load_model(f"llama.cpp:{words(file, add_bos=True)}")
    assert tokenizer.encode("é" * 40 + "</s>") == [0] + [5] * 40 + [1]
    assert tokenizer.encode("ab", add_special_tokens=False) == [2, 3]
    assert model.vocabulary.bytes_of_token(6) == b"x" * 100
    assert [i for i in range(10) if model.vocabulary.is_special(i)] == [0, 1]
    talk = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "<s>user:ab;"
    assert tokenizer.apply_chat_template(talk, add_generation_prompt=True) == [0, 7, 8, 2, 3, 9, 2, 8]
    assert tokenizer.apply_chat_template(talk, chat_template="{{ messages[0].content }}") == [2, 3]
    assert tokenizer.apply_chat_template(talk, return_dict=True) == {"input_ids": [0, 7, 8, 2, 3, 9]}
    with pytest.raises(ModelError, match="refuses this conversation: too long"):
        tokenizer.apply_chat_template(talk * 4)


def test_a_file_without_a_template(fake, file):
    _, tokenizer = load_model(f"llama.cpp:{words(file, template=None)}")
    assert tokenizer.chat_template is None
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.apply_chat_template([])


def test_the_template_runs_in_a_sandbox(fake, file):
    path = words(file, template="{{ messages.__class__.__mro__ }}")
    _, tokenizer = load_model(f"llama.cpp:{path}")
    with pytest.raises(ModelError, match="refuses"):
        tokenizer.apply_chat_template([])


def test_what_cannot_be_loaded(fake, file, tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        load_model(f"llama.cpp:{tmp_path}/none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGML")
    with pytest.raises(ModelError, match=r"cannot read this file \(invalid magic\)"):
        load_model(f"llama.cpp:{tmp_path}/bad.gguf")
    with pytest.raises(ModelError, match="decoder-only"):
        load_model(f"llama.cpp:{file(encoder=True)}")
    with pytest.raises(ModelError, match="dtype='float32'"):
        load_model(f"llama.cpp:{file()}", dtype="float32")
    with pytest.raises(ModelError, match="deterministic=True"):
        load_model(f"llama.cpp:{file()}", deterministic=True)
    with pytest.raises(ModelError, match=r"max_model_len=257: must be in \[1, 256\]"):
        load_model(f"llama.cpp:{file()}", max_model_len=257)
    assert load_model(f"llama.cpp:{file()}", max_model_len=100)[0].max_model_len == 100
    with pytest.raises(ModelError, match="batch_size=0"):
        LlamaCppModel(file(), batch_size=0)


def test_without_the_package(monkeypatch, file):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr("builtins.__import__", refuse(__import__))
    with pytest.raises(MissingExtra, match=r"llama-cpp-python is not installed; klero\[llamacpp\] brings it"):
        load_model(f"llama.cpp:{file()}")


def refuse(real):
    def imported(name, *args, **options):
        if name == "llama_cpp":
            raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
        return real(name, *args, **options)

    return imported


def test_a_package_that_is_too_old(use, file):
    class Old(FakeLlamaCpp):
        @property
        def llama_memory_seq_rm(self):
            raise AttributeError

    use(Old())
    with pytest.raises(ModelError, match=r"llama-cpp-python 0\.0-fake is too old"):
        load_model(f"llama.cpp:{file()}")


@pytest.mark.smollm2
@pytest.mark.skipif(not have_package, reason="llama-cpp-python is not installed: pip install '.[llamacpp]'")
class TestTheRealOne:
    """On SmolLM2's GGUF file."""

    PROMPTS = ("Once upon a time", "The capital of France is", "def fibonacci(n):", "Roses are red")

    def test_greedy_text_is_llama_cpps_own(self):
        from llama_cpp import Llama

        llm = LLM("llama.cpp:smollm2")
        own = Llama(str(llm.engine.model.path), n_ctx=2048, verbose=False, flash_attn=True, n_threads=1)
        for prompt in self.PROMPTS:
            (output,) = LLM("llama.cpp:smollm2").generate(prompt, SamplingParams(max_tokens=24))
            assert list(output.prompt_token_ids) == own.tokenize(prompt.encode(), special=True)
            own.reset()
            drawn = own.generate(list(output.prompt_token_ids), temp=0.0, repeat_penalty=1.0)
            assert [token for token, _ in zip(drawn, range(24), strict=False)] == list(output.outputs[0].token_ids)

    def test_chunks_batches_and_growth_keep_the_logits(self, packer):
        """llama.cpp promises no bits; a token out of place would move logits by as much as their spread, about 6."""
        rng = np.random.default_rng(0)
        path = llamacpp.smollm2.find_gguf()
        model = LlamaCppModel(path, num_tokens=64, batch_size=33)
        tokenizer, p = model.tokenizer, packer(64, 16)
        texts = [tokenizer.encode(f"{prompt}. " * (8 + 5 * i)) for i, prompt in enumerate(self.PROMPTS)]
        slots, rows = [3, 9, 0, 12], [[] for _ in texts]
        for slot in slots:
            p.join(slot)
        while any(p.done[slot] < len(text) for slot, text in zip(slots, texts, strict=True)):
            turn = [i for i in rng.permutation(4) if p.done[slots[i]] < len(texts[i])]
            parts = [slice(p.done[slots[i]], p.done[slots[i]] + int(rng.integers(1, 20))) for i in turn]
            chunks = [(slots[i], texts[i][part]) for i, part in zip(turn, parts, strict=True)]
            logits, begin = model.forward(p.step(chunks)), 0
            for i, (_, chunk) in zip(turn, chunks, strict=True):
                rows[i].append(logits[begin : (begin := begin + len(chunk))])
        assert (model._context.num_seqs, model._context.num_tokens) == (16, 512)
        for text, got in zip(texts, rows, strict=True):
            q = packer(64, 16)
            q.join(0)
            whole = LlamaCppModel(path).forward(q.step([(0, text)]))
            assert np.abs(np.concatenate(got) - whole).mean() < 0.5
