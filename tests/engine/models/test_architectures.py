"""Every architecture that klero calls checked: through the whole engine, beside the module's own eager attention.

And every one that it calls refused. The lists are those of `klero.engine.models.checked`.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from klero import SamplingParams
from klero.engine import Engine
from klero.engine.models import load_model
from klero.engine.models.checked import CHECKED, REFUSED
from klero.engine.models.transformers import TransformersModel
from klero.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL]
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# What a tiny model needs beside the sizes of all; windows are short, so that texts are longer.
ARCHITECTURES = {
    "LlamaForCausalLM": {},
    "ApertusForCausalLM": {},
    "CohereForCausalLM": {"logit_scale": 1.0},
    "Ernie4_5ForCausalLM": {},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoXForCausalLM": {},
    "GemmaForCausalLM": {},
    "Glm4ForCausalLM": {},
    "GraniteForCausalLM": {"residual_multiplier": 0.7, "logits_scaling": 2.0, "attention_multiplier": 0.3},
    "NemotronForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "PhiForCausalLM": {},
    "SeedOssForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "StableLmForCausalLM": {"use_qkv_bias": True, "qk_layernorm": True},
    "GPT2LMHeadModel": {},
    "GPTBigCodeForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "MistralForCausalLM": {"sliding_window": 5},
    "Cohere2ForCausalLM": {"sliding_window": 5, "layer_types": MIXED, "logit_scale": 1.0},
    "Exaone4ForCausalLM": {"sliding_window": 5, "layer_types": MIXED},
    "Gemma3ForCausalLM": {"sliding_window": 5, "layer_types": MIXED, "query_pre_attn_scalar": 8},
    "Olmo3ForCausalLM": {"sliding_window": 5, "layer_types": MIXED},
    "Phi3ForCausalLM": {"sliding_window": 5},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED},
    "Starcoder2ForCausalLM": {"sliding_window": 5},
    "Gemma2ForCausalLM": {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "MiniCPM3ForCausalLM": LATENT,
    "Glm4MoeForCausalLM": ROUTED_EXPERTS,
    "GraniteMoeForCausalLM": LOCAL_EXPERTS,
    "OlmoeForCausalLM": EXPERTS,
    "Qwen3MoeForCausalLM": EXPERTS,
    "MixtralForCausalLM": {**LOCAL_EXPERTS, "sliding_window": 5},
    "PhimoeForCausalLM": {**LOCAL_EXPERTS, "sliding_window": 5},
    "Qwen2MoeForCausalLM": {**EXPERTS, "use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED},
    "GptOssForCausalLM": {
        **LOCAL_EXPERTS,
        "sliding_window": 6,
        "layer_types": MIXED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "DeepseekV2ForCausalLM": {**ROUTED_EXPERTS, **LATENT},
    "DeepseekV3ForCausalLM": {**ROUTED_EXPERTS, **LATENT},
}
ODD = {"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 52, "vocab_size": 101}
VARIANTS = {
    "LlamaForCausalLM": {**ODD, "head_dim": 12, "num_key_value_heads": 1},
    "Gemma2ForCausalLM": {**ODD, "head_dim": 12, "num_key_value_heads": 3, "sliding_window": 7},
    "GPT2LMHeadModel": ODD,
    "MixtralForCausalLM": {**ODD, **LOCAL_EXPERTS, "head_dim": 20, "num_key_value_heads": 3},
}
PROMPT_LENGTHS = (9, 2, 15, 1, 33, 12, 5)
MAX_TOKENS = (11, 12, 9, 8, 3, 7, 6)


def tiny_model(named, name, changes):
    """Two layers, where the changes do not say otherwise."""
    return named(name, **{"num_hidden_layers": 2, **changes})


class Recorder:
    """A model that notes each row it gives by the tokens before it, whichever schedule has led there."""

    def __init__(self, model):
        self.model, self.rows = model, {}
        self._texts = {}

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, step):
        logits = self.model.forward(step)
        assert logits.shape == (len(step.logits_rows), self.model.vocab_size)
        sequence_of_token = np.repeat(step.slots, np.diff(step.query_starts))
        for token, slot, position in zip(step.input_ids, sequence_of_token, step.positions, strict=True):
            self._texts[slot] = (*self._texts.get(slot, ())[:position], int(token))
            assert len(self._texts[slot]) == position + 1
        for row, token in zip(logits, step.logits_rows, strict=True):
            text = self._texts[sequence_of_token[token]][: step.positions[token] + 1]
            self.rows.setdefault(text, []).append(row.clone())
        return logits


def same_bits(row, other):
    return torch.equal(row.view(torch.int32), other.view(torch.int32))


def eager(module):
    """A copy of the module on its own eager attention."""
    plain = copy.deepcopy(module)
    plain.set_attn_implementation("eager")
    return plain


def plain_logits(plain, ids):
    with torch.inference_mode():
        return plain(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0]


def prompts(vocab_size):
    rng = np.random.default_rng(3)
    return [rng.integers(3, vocab_size, length).tolist() for length in PROMPT_LENGTHS]


def serve(model):
    """Run the prompts in small steps over few small blocks, the last three added on the way; prompts and tokens."""
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=17, block_size=3, num_blocks=18, seed=1)
    texts, outputs = prompts(model.vocab_size), []
    for n, (ids, max_tokens) in enumerate(zip(texts, MAX_TOKENS, strict=True)):
        if n > 3:
            outputs += engine.step()
        engine.add_request(str(n), ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while engine.num_unfinished:
        outputs += engine.step()
    assert engine.scheduler.num_preemptions > 0
    tokens = {int(output.request_id): list(output.outputs[0].token_ids) for output in outputs}
    return texts, [tokens[n] for n in range(len(texts))]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_engine_gives_the_text_of_the_module_alone(named, name):
    module = tiny_model(named, name, ARCHITECTURES[name])
    plain = eager(module)
    model = Recorder(load_model(module)[0])
    num_rows = 0
    for ids, tokens in zip(*serve(model), strict=True):
        expected = plain_logits(plain, ids + tokens)
        tolerance = 1e-4 * max(1.0, float(expected.std()))
        for position in range(len(ids) - 1, len(ids) + len(tokens) - 1):
            # A text of length p + 1 decides token p + 1, so that equal argmax all along is equal greedy text.
            assert tokens[position + 1 - len(ids)] == int(expected[position].argmax())
            for row in model.rows[tuple((ids + tokens)[: position + 1])]:
                torch.testing.assert_close(row, expected[position], rtol=0, atol=tolerance)
                num_rows += 1
    assert num_rows >= sum(MAX_TOKENS)


def in_pieces(model, packer, texts, block_size, sizes):
    """Compute the texts side by side, each step taking from each text the next of `sizes`; every row is asked for."""
    num_blocks = sum(-(-len(ids) // block_size) for ids in texts)
    model.allocate(num_blocks, block_size)
    steps = packer(num_blocks, block_size)
    for slot in range(len(texts)):
        steps.join(slot)
    turn = 0
    while running := [slot for slot in range(len(texts)) if steps.done[slot] < len(texts[slot])]:
        chunks = []
        for slot in running:
            size = sizes[(turn + slot) % len(sizes)]
            chunks.append((slot, np.array(texts[slot][steps.done[slot] : steps.done[slot] + size])))
        model.forward(steps.step(chunks))
        turn += 1


def record_schedules(model, packer):
    """Return every row of the prompts as each of many schedules gives it, by the tokens before it."""
    recorder = Recorder(model)
    texts = prompts(model.vocab_size)
    for ids in texts:
        in_pieces(recorder, packer, [ids], 16, [len(ids)])  # alone, whole
    for size, length in ((1, 12), (7, 33), (16, 33)):
        in_pieces(recorder, packer, [ids for ids in texts if len(ids) == length], 16, [size])  # alone, in chunks
    for block_size in (4, 16, 5):
        in_pieces(recorder, packer, texts, block_size, [99])  # all at once
        in_pieces(recorder, packer, texts, block_size, [3, 1, 16, 1, 1, 7, 2])  # prefills, chunks and decodes together
    serve(recorder)
    return recorder.rows


def assert_bits(model, packer):
    rows = record_schedules(model, packer)
    assert max(len(same) for same in rows.values()) >= 10
    wrong = {text: same for text, same in rows.items() if not all(same_bits(same[0], row) for row in same)}
    assert not wrong, f"{len(wrong)} of {len(rows)} rows have other bits in another schedule"


# At least one of each kind, of each kind of product (Conv1D, experts of every layout) and of each scaling.
QUICK = {
    *("LlamaForCausalLM", "CohereForCausalLM", "GPTNeoXForCausalLM", "GraniteForCausalLM", "StableLmForCausalLM"),
    *("GPT2LMHeadModel", "OPTForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM"),
    *("Gemma2ForCausalLM", "MiniCPM3ForCausalLM", "GraniteMoeForCausalLM", "Qwen3MoeForCausalLM"),
    *("PhimoeForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"),
}
DETERMINISTIC = [
    pytest.param(architecture.name, marks=[] if architecture.name in QUICK else pytest.mark.deep)
    for architecture in CHECKED
    if architecture.deterministic
]


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_bits(named, packer, name):
    assert_bits(TransformersModel(tiny_model(named, name, ARCHITECTURES[name]), deterministic=True), packer)


@pytest.mark.parametrize("name", VARIANTS)
def test_bits_of_widths_that_no_register_divides(named, packer, name):
    assert_bits(TransformersModel(tiny_model(named, name, VARIANTS[name]), deterministic=True), packer)


def test_the_list_is_what_is_tested():
    assert set(ARCHITECTURES) > QUICK
    assert [architecture.name for architecture in CHECKED] == list(ARCHITECTURES)
    assert [architecture.name for architecture in REFUSED] == list(REFUSALS)
    assert not set(ARCHITECTURES) & set(REFUSALS)


@pytest.mark.parametrize("architecture", CHECKED, ids=lambda architecture: architecture.name)
def test_the_kind_is_that_of_the_tiny_model(named, architecture):
    """So that a kind is tested wherever it is claimed, and claimed wherever it is tested."""
    module = tiny_model(named, architecture.name, ARCHITECTURES[architecture.name])
    config, names = module.config, {name.split(".")[-1] for name, _ in module.named_modules()}
    window = getattr(config, "sliding_window", None)
    sliding = window is not None and SLIDING in (getattr(config, "layer_types", None) or [SLIDING])
    shapes = TransformersModel(module, deterministic=False)._layer_shapes.values()
    experts = bool(names & {"experts", "block_sparse_moe"})
    found = {
        "dense": not experts,
        "mixture of experts": experts,
        "sliding window": sliding,
        "soft cap": getattr(config, "attn_logit_softcapping", None) is not None,
        "attention sinks": any(name.endswith("sinks") for name, _ in module.named_parameters()),
        "learned positions": bool(names & {"wpe", "embed_positions"}),
        "values narrower than keys": all(key > value for _, key, value in shapes),
    }
    assert architecture.kind.split(", ") == [kind for kind, has in found.items() if has]
    assert not sliding or window < max(PROMPT_LENGTHS)


RECURRENT = "linear_attention"
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8}
# What a tiny model needs, and what the error must say.
REFUSALS = {
    "BloomForCausalLM": ({}, "stays on"),
    "FalconForCausalLM": ({"head_dim": None}, "stays on"),
    "GPTNeoForCausalLM": ({"num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]]}, "stays on"),
    "MptForCausalLM": ({"n_layers": 2, "n_heads": 4, "d_model": 32}, "stays on"),
    "XGLMForCausalLM": ({"ffn_dim": 48}, "stays on"),
    "BambaForCausalLM": (MAMBA2, RECURRENT),
    "FalconH1ForCausalLM": ({}, "layers of type hybrid"),
    "FalconMambaForCausalLM": ({}, RECURRENT),
    "JambaForCausalLM": ({"num_experts": 2}, RECURRENT),
    "MambaForCausalLM": ({}, RECURRENT),
    "Mamba2ForCausalLM": ({"num_heads": 8, "head_dim": 8}, RECURRENT),
    "MiniMaxForCausalLM": (LOCAL_EXPERTS, RECURRENT),
    "NemotronHForCausalLM": ({"n_routed_experts": 4}, RECURRENT),
    "Qwen3NextForCausalLM": ({**EXPERTS, "shared_expert_intermediate_size": 16, "num_hidden_layers": 4}, RECURRENT),
    "Qwen3_5ForCausalLM": ({"num_hidden_layers": 4}, RECURRENT),
    "RecurrentGemmaForCausalLM": ({}, RECURRENT),
    "Zamba2ForCausalLM": ({"layers_block_type": ["mamba", "hybrid", "mamba"]}, RECURRENT),
    "Lfm2ForCausalLM": ({"layer_types": ["conv", FULL, "conv"]}, "layers of type conv"),
    "Lfm2MoeForCausalLM": ({**EXPERTS, "layer_types": ["conv", FULL, "conv"]}, "layers of type conv"),
    "Llama4ForCausalLM": ({**LOCAL_EXPERTS, "num_hidden_layers": 4}, "layers of type chunked_attention"),
    "DeepseekV32ForCausalLM": ({**ROUTED_EXPERTS, **LATENT}, "layers of type indexed_attention"),
    "T5ForConditionalGeneration": ({"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2}, "encoder-decoder"),
    "BertLMHeadModel": ({"is_decoder": False}, "attends to later tokens"),
    "RobertaForCausalLM": ({"is_decoder": True, "pad_token_id": 1}, "other logits"),
    "DiffLlamaForCausalLM": ({}, "attends twice"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_is_refused_with_its_reason(named, name):
    changes, says = REFUSALS[name]
    with pytest.raises(ModelError, match=says):
        load_model(named(name, **changes))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "GraniteMoeForCausalLM"])
def test_a_window_that_the_architecture_ignores_is_refused(named, name):
    with pytest.raises(ModelError, match=r"sliding_window=127.*ignores it"):
        load_model(named(name, sliding_window=127))
    load_model(named(name, sliding_window=128))  # as long as the context
    load_model(named(name, sliding_window=5, layer_types=[FULL] * 3))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_of_one_layer_type_that_depends_on_the_longest_bounds_the_context(named, kind):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    scaled = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
    if kind == "longrope":
        scaled |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    changes = {
        **ARCHITECTURES["Gemma3ForCausalLM"],
        "num_hidden_layers": 2,
        "rope_parameters": {FULL: scaled, SLIDING: plain},
    }
    assert load_model(named("Gemma3ForCausalLM", **changes))[0].max_model_len == 24
    with pytest.raises(ModelError, match=f"rope_type '{kind}'"):
        load_model(named("Gemma3ForCausalLM", **changes), max_model_len=25)


def test_the_records_are_frozen():
    for architecture in (*CHECKED, *REFUSED):
        with pytest.raises(dataclasses.FrozenInstanceError):
            architecture.name = "other"
