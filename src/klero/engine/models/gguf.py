"""GGUF files through transformers, with what its conversion leaves out put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from klero.engine.models.extra import loading, require
from klero.errors import ModelError

# Vocabularies whose merges were learned with every digit alone. transformers knows most of the names under
# `tokenizer.ggml.pre`, these it leaves with GPT-2's splitting, which keeps runs of digits together.
SINGLE_DIGIT_PRE = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})

# A GGUF names one end id; chat models have more. These texts end a turn or a document wherever they are
# control tokens.
END_TEXTS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
    | {"<|END_OF_TURN_TOKEN|>", "<|end▁of▁sentence|>", "<eos>", "</s>", "<|return|>", "<|call|>", "<EOT>"}
)


def load(path: Path, dtype: str) -> tuple[Any, Any]:
    """Return module and tokenizer of the GGUF file at `path`, dequantised to `dtype`.

    The module is an ordinary one: it can be saved, and saved again. Takes tens of seconds for a 100 MB file.
    ModelError if transformers cannot read this architecture or file.
    """
    for package in ("gguf", "accelerate"):
        require(package)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        with loading():
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
            module = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=dtype, **where)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"{path}: transformers cannot read this GGUF file ({str(error).strip()}); "
            "load the original checkpoint of the model instead"
        ) from error
    _forget_quantizer(module)
    restore_digits(tokenizer, pre_tokenizer_name(path))
    module.generation_config.eos_token_id = list(end_token_ids(module, tokenizer))
    return module, tokenizer


def _forget_quantizer(module: Any) -> None:
    """Make a dequantised module an ordinary one; with these left, `save_pretrained` refuses to write it."""
    module.hf_quantizer = None
    module.is_quantized = False
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config


def pre_tokenizer_name(path: Path) -> str | None:
    """Return what the file says of how text is split before merging (`tokenizer.ggml.pre`), or None."""
    from gguf import GGUFReader

    field = GGUFReader(str(path)).fields.get("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def restore_digits(tokenizer: Any, pre: str | None) -> None:
    """Split every digit off before merging, in place, if the vocabulary `pre` was learned that way."""
    if pre not in SINGLE_DIGIT_PRE:
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def end_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the end ids that are named, and the control tokens that end texts, ascending."""
    from klero.engine.models.checks import end_ids

    named = end_ids(module.generation_config, module.config, tokenizer)
    by_text = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special and token.content in END_TEXTS}
    return tuple(sorted({*named, *by_text}))
