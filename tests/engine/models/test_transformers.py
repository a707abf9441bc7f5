"""Unmodified transformers models on packed, mixed steps, against plain forwards of the same weights."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
import transformers

from klero.engine.models.attention import ATTENTION_NAME
from klero.engine.models.protocol import Model
from klero.engine.models.transformers import TransformersModel
from klero.errors import ModelError

BLOCK = 4
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

ARCHITECTURES = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "GptOss": {
        "sliding_window": 6,
        "layer_types": SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": SLIDING,
    },
    "Phimoe": {"sliding_window": 6, "num_local_experts": 4},
}


def plain_logits(module, ids):
    with torch.inference_mode():
        return module(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0]


def run_mixed(model, packer, seed=1):
    """Serve nine requests with chunked prefill, decodes, joins and leaves; return ids and logits of each."""
    rng = np.random.default_rng(seed)
    texts = {n: rng.integers(3, model.vocab_size, rng.integers(8, 45)) for n in range(9)}
    waiting, logits = list(texts), {n: [] for n in texts}
    num_blocks = 60
    p = packer(num_blocks, BLOCK, seed)
    model.allocate(num_blocks, BLOCK)
    running = []
    while waiting or running:
        while waiting and len(running) < 4:
            running.append(waiting.pop(0))
            p.join(running[-1])
        rng.shuffle(running)
        chunks = []
        for n in running:
            done, total = p.done[n], len(texts[n])
            take = 1 if done > total // 2 else int(rng.integers(1, 12))
            chunks.append((n, texts[n][done : done + take]))
        step = p.step(chunks)
        got = model.forward(step)
        assert got.shape == (len(step.input_ids), model.vocab_size)
        for i, (n, _) in enumerate(chunks):
            logits[n].append(got[step.query_starts[i] : step.query_starts[i + 1]].clone())
        for n in [n for n in running if p.done[n] == len(texts[n])]:
            p.leave(n)
            model.release(n)
            running.remove(n)
    return texts, {n: torch.cat(parts) for n, parts in logits.items()}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_packed_steps_equal_plain_forwards(tiny, packer, kind):
    module = tiny(kind, **ARCHITECTURES[kind])
    plain = copy.deepcopy(module)
    plain.set_attn_implementation("eager")
    model = TransformersModel(module)
    assert isinstance(model, Model)
    texts, logits = run_mixed(model, packer)
    for n, ids in texts.items():
        expected = plain_logits(plain, ids)
        torch.testing.assert_close(logits[n], expected, rtol=0, atol=1e-4 * max(1.0, float(expected.std())))
        assert (logits[n].argmax(-1) == expected.argmax(-1)).all()


def test_only_the_asked_rows_come_back_in_their_order(tiny, packer):
    model = TransformersModel(tiny("Llama"))
    model.allocate(16, BLOCK)
    p = packer(16, BLOCK)
    for slot in (0, 1, 2):
        p.join(slot)
    chunks = [(0, np.arange(5)), (1, np.arange(9)), (2, np.arange(3))]
    step = p.step(chunks, every_row=False)
    rows = model.forward(step)
    for row, (_, ids) in zip(rows, chunks, strict=True):
        model.module.set_attn_implementation("eager")
        torch.testing.assert_close(row, plain_logits(model.module, ids)[-1], rtol=0, atol=1e-4)


def test_a_step_that_samples_nothing_gives_no_rows(tiny, packer):
    model = TransformersModel(tiny("Llama"))
    model.allocate(16, BLOCK)
    p = packer(16, BLOCK)
    p.join(0)
    step = p.step([(0, np.arange(5))])
    object.__setattr__(step, "logits_rows", np.zeros(0, np.int64))
    assert model.forward(step).shape == (0, 97)


def test_a_model_without_logits_to_keep_gives_the_same_rows(tiny, packer, monkeypatch):
    from klero.engine.models import forward

    monkeypatch.setattr(forward, "_takes_logits_to_keep", lambda kind: False)
    model = TransformersModel(tiny("Llama"))
    model.allocate(16, BLOCK)
    p = packer(16, BLOCK)
    p.join(0)
    assert model.forward(p.step([(0, np.arange(5))], every_row=False)).shape == (1, 97)


def test_shares_the_weights_of_a_live_module(tiny, packer):
    module = tiny("Llama").train()
    model = TransformersModel(module)
    model.allocate(16, BLOCK)
    step = packer(16, BLOCK)
    step.join(0)
    step = step.step([(0, np.arange(6))])
    before = model.forward(step).clone()
    module.set_attn_implementation("sdpa")  # its owner trains on
    module.train()
    loss = module(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.5 * parameter.grad
    after = model.forward(step)
    assert not module.training
    assert not torch.allclose(before, after)
    module.set_attn_implementation("eager")
    torch.testing.assert_close(after, plain_logits(module, np.arange(6)), rtol=0, atol=1e-4)


def test_outside_of_the_engine_the_module_says_whose_it_is(tiny, packer):
    model = TransformersModel(tiny("Llama"))
    model.allocate(16, BLOCK)
    p = packer(16, BLOCK)
    p.join(0)
    model.forward(p.step([(0, np.arange(3))]))
    with pytest.raises(ModelError, match="set_attn_implementation"):
        plain_logits(model.module, [1, 2])


def test_two_models_in_two_threads(tiny, packer):
    kinds = ["Llama", "Mistral"]
    plain = [tiny(kind, **ARCHITECTURES[kind]) for kind in kinds]
    models = [TransformersModel(copy.deepcopy(module)) for module in plain]
    results = [None, None]

    def serve(i):
        results[i] = run_mixed(models[i], packer, seed=10 + i)

    threads = [threading.Thread(target=serve, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for module, (texts, logits) in zip(plain, results, strict=True):
        for n, ids in texts.items():
            torch.testing.assert_close(logits[n], plain_logits(module, ids), rtol=0, atol=1e-3)


def test_bytes_per_block_are_those_of_the_cache(tiny):
    model = TransformersModel(tiny("Llama"))
    model.allocate(num_blocks=5, block_size=16)
    held = sum(t.nbytes for layer in model._cache.layers.values() for t in (layer.keys, layer.values))
    assert model.bytes_per_block(16) * (5 + 1) == held  # and the scratch block


def test_half_precision_keeps_its_dtype(tiny, packer):
    module = tiny("Llama").bfloat16()
    model = TransformersModel(module)
    assert model.bytes_per_block(16) == 16 * 3 * 2 * 2 * 8 * 2
    assert all(parameter.dtype == torch.bfloat16 for parameter in module.parameters())
    model.allocate(8, BLOCK)
    p = packer(8, BLOCK)
    p.join(0)
    logits = [model.forward(p.step([(0, np.arange(6))])), model.forward(p.step([(0, np.arange(6, 7))]))]
    assert logits[0].dtype == torch.bfloat16
    expected = plain_logits(tiny("Llama"), np.arange(7))
    assert (torch.cat(logits).float() - expected).abs().max() < 0.2 * expected.std()


def test_end_ids_are_all_that_anybody_names(tiny):
    module = tiny("Llama", eos_token_id=[2, 11])
    module.generation_config.eos_token_id = 7
    assert TransformersModel(module).end_token_ids == (2, 7, 11)


def test_forward_needs_a_cache(tiny):
    with pytest.raises(ModelError, match="allocate"):
        TransformersModel(tiny("Llama")).forward(None)


@pytest.mark.parametrize(
    "asked, rope, length",
    [
        (None, None, 128),
        (20, None, 20),
        (129, None, "128"),
        (0, None, "at least 1"),
        (None, {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, 32),
        (64, {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, "rope_type"),
    ],
)
def test_context_length(tiny, asked, rope, length):
    rope = rope and {"rope_theta": 10000.0, **rope}
    module = tiny("Llama", rope_parameters=rope)
    if isinstance(length, int):
        assert TransformersModel(module, max_model_len=asked).max_model_len == length
    else:
        with pytest.raises(ModelError, match=length):
            TransformersModel(module, max_model_len=asked)


def refused(kind):
    sizes = {
        "Bloom": {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2},
        "Mpt": {"vocab_size": 64, "d_model": 16, "n_layers": 1, "n_heads": 2},
        "Mamba": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1},
        "Qwen3Next": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "num_experts": 2},
    }
    config = getattr(transformers, f"{kind}Config")(**sizes[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize(
    "kind, says",
    [
        ("Bloom", "stays on"),
        ("Mpt", "stays on"),
        ("Mamba", "linear_attention"),
        ("Qwen3Next", "linear_attention"),
    ],
)
def test_models_that_would_silently_be_wrong_are_refused(kind, says):
    with pytest.raises(ModelError, match=says):
        TransformersModel(refused(kind))


def test_a_module_that_is_no_language_model_is_refused(tiny):
    with pytest.raises(ModelError, match=r"klero\.engine\.models\.Model"):
        TransformersModel(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="language-model head"):
        TransformersModel(tiny("Llama").model)
    with torch.device("meta"), pytest.raises(ModelError, match="meta"):
        TransformersModel(transformers.LlamaForCausalLM(tiny("Llama").config))


def corrupt_positions(module):
    inner = module.model.forward
    module.model.forward = lambda *a, position_ids=None, **k: inner(*a, **k)


def leak_between_tokens(module):
    layer = module.model.layers[1]
    inner = layer.forward
    layer.forward = lambda hidden, *a, **k: inner(hidden + 0.01 * hidden.mean(1, keepdim=True), *a, **k)


def skip_a_layer(module):
    module.model.layers[1].self_attn.forward = lambda hidden_states, **k: (hidden_states, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "corrupt, says",
    [
        (corrupt_positions, "wrong tokens"),
        (leak_between_tokens, "wrong tokens"),
        (skip_a_layer, r"layers \[1\]"),
    ],
)
def test_the_probe_finds_what_the_configuration_does_not_tell(tiny, corrupt, says, dtype):
    module = tiny("Llama").to(dtype)
    corrupt(module)
    with pytest.raises(ModelError, match=says):
        TransformersModel(module)
    assert module.config._attn_implementation != ATTENTION_NAME  # it goes back as it came


def test_a_forward_that_raises_is_told_as_a_model_error(tiny):
    module = tiny("Llama")
    module.model.norm.forward = lambda hidden: 1 / 0
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        TransformersModel(module)


def test_a_model_too_large_to_copy_is_probed_in_its_own_dtype(tiny, monkeypatch):
    from klero.engine.models import probe

    monkeypatch.setattr(probe, "MAX_COPIED_WEIGHTS", 0)
    TransformersModel(tiny("Llama").bfloat16())
    module = tiny("Llama").bfloat16()
    corrupt_positions(module)
    with pytest.raises(ModelError, match=r"in torch\.bfloat16"):
        TransformersModel(module)


def test_a_closed_model_gives_the_module_its_own_attention_back(tiny):
    from klero.engine import LLM

    module = tiny("Llama")
    ids = torch.tensor([[1, 5, 7]])
    before = module(ids).logits
    with LLM(module) as llm:
        llm.generate([[1, 5, 7]])
    assert torch.equal(module(ids).logits, before)


def test_a_callers_autocast_and_default_dtype_change_nothing(tiny, packer):
    module = tiny("Gemma2")
    model = TransformersModel(module)
    rows = []
    for dtype in (torch.float32, torch.float64):
        model.allocate(8, 4)
        p = packer(8, 4)
        p.join(0)
        torch.set_default_dtype(dtype)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float64):
                rows.append(model.forward(p.step([(0, np.array([1, 5, 7]))])))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(rows[0], rows[1])
