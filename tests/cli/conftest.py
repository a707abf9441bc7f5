"""A tiny model on disk, with a tokenizer of single bytes, a chat template and a generation config."""

from __future__ import annotations

import pytest

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The directory of a random Llama that a command can load in a second."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate(["<end>", *alphabet])}
    backend = Tokenizer(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).float().eval()
    module.generation_config = transformers.GenerationConfig(
        eos_token_id=0, do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.1, max_new_tokens=9,
        encoder_repetition_penalty=1.2,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("tiny") / "model"
    module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
