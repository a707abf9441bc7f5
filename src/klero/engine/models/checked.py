"""Which architectures of transformers were checked here, and which are refused for what reason.

Only a record: loading does not look it up, and any causal model that passes the probe runs. One that is listed was
compared with its own eager attention through the whole engine, as a tiny random model: test_architectures.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckedArchitecture:
    """An architecture whose text the engine gives as the module alone would."""

    name: str  # the class, as `architectures` in config.json has it
    kind: str  # what is special about it, in a few words
    deterministic: bool  # logits are the same bits whatever the batch, in float32 on a CPU


@dataclass(frozen=True)
class RefusedArchitecture:
    """An architecture that raises ModelError when it is loaded."""

    name: str
    reason: str


def _checked(kind: str, *names: str, deterministic: bool = True) -> tuple[CheckedArchitecture, ...]:
    return tuple(CheckedArchitecture(name, kind, deterministic) for name in names)


def _refused(reason: str, *names: str) -> tuple[RefusedArchitecture, ...]:
    return tuple(RefusedArchitecture(name, reason) for name in names)


CHECKED: tuple[CheckedArchitecture, ...] = (
    *_checked(
        "dense",
        "LlamaForCausalLM",
        "ApertusForCausalLM",
        "CohereForCausalLM",
        "Ernie4_5ForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoXForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "NemotronForCausalLM",
        "Olmo2ForCausalLM",
        "PhiForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
    ),
    *_checked("dense, learned positions", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "OPTForCausalLM"),
    *_checked(
        "dense, sliding window",
        "MistralForCausalLM",
        "Cohere2ForCausalLM",
        "Exaone4ForCausalLM",
        "Gemma3ForCausalLM",
        "Olmo3ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Starcoder2ForCausalLM",
    ),
    *_checked("dense, sliding window, soft cap", "Gemma2ForCausalLM"),
    *_checked("dense, values narrower than keys", "MiniCPM3ForCausalLM"),
    *_checked(
        "mixture of experts",
        "Glm4MoeForCausalLM",
        "GraniteMoeForCausalLM",
        "OlmoeForCausalLM",
        "Qwen3MoeForCausalLM",
    ),
    *_checked(
        "mixture of experts, sliding window",
        "MixtralForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2MoeForCausalLM",
    ),
    *_checked("mixture of experts, sliding window, attention sinks", "GptOssForCausalLM"),
    *_checked("mixture of experts, values narrower than keys", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
)

REFUSED: tuple[RefusedArchitecture, ...] = (
    *_refused(
        "its attention is written out in the architecture and cannot be replaced by a paged one",
        "BloomForCausalLM",
        "FalconForCausalLM",
        "GPTNeoForCausalLM",
        "MptForCausalLM",
        "XGLMForCausalLM",
    ),
    *_refused(
        "some of its layers keep a recurrent state instead of keys and values",
        "BambaForCausalLM",
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "JambaForCausalLM",
        "MambaForCausalLM",
        "Mamba2ForCausalLM",
        "MiniMaxForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "RecurrentGemmaForCausalLM",
        "Zamba2ForCausalLM",
    ),
    *_refused("some of its layers are convolutions over neighbouring tokens", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
    *_refused("some of its layers attend within chunks of the text", "Llama4ForCausalLM"),
    *_refused("its layers choose the keys that a query attends to", "DeepseekV32ForCausalLM"),
    *_refused("it is an encoder-decoder", "T5ForConditionalGeneration"),
    *_refused("its tokens attend to later ones", "BertLMHeadModel"),
    *_refused("it counts positions from the padding id, not from 0", "RobertaForCausalLM"),
    *_refused("its layers attend twice in one step", "DiffLlamaForCausalLM"),
)
