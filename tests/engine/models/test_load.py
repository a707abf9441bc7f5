"""Names, paths and live modules on their way to a model."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from klero.engine.models import gguf, load_model, smollm2
from klero.engine.models.extra import require
from klero.errors import MissingExtra, ModelError


def first_logits(model, packer, ids):
    model.allocate(16, 4)
    p = packer(16, 4)
    p.join(0)
    return model.forward(p.step([(0, np.asarray(ids))])).float()


@pytest.fixture
def tiny_gguf(tiny, tmp_path):
    """A GGUF file of a tiny random Llama with a byte vocabulary; also the module it was made of."""
    writer_of = pytest.importorskip("gguf").GGUFWriter
    pytest.importorskip("accelerate")
    alphabet = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "12", "34", "Ġ1"]
    module = tiny("Llama", vocab_size=len(tokens), tie_word_embeddings=True, hidden_size=32)
    path = tmp_path / "tiny.gguf"
    writer = writer_of(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2", "3 4", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def interleaved(weight, heads):  # GGUF keeps the rotary halves of a Llama head interleaved
        rows, columns = weight.shape
        return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
    }
    names |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {
        f"mlp.{x}_proj": f"ffn_{x}" for x in ("up", "down", "gate")
    }
    for name, tensor in module.state_dict().items():
        array = tensor.numpy()
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", array)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", array)
        elif name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            if part.endswith(("q_proj", "k_proj")):
                array = interleaved(array, 4 if part.endswith("q_proj") else 2)
            writer.add_tensor(f"blk.{layer}.{names[part]}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, module


def test_a_live_module_is_taken_as_it_is(tiny):
    module = tiny("Llama")
    model, tokenizer = load_model(module, max_model_len=33)
    assert model.module is module
    assert tokenizer is None
    assert model.max_model_len == 33


def test_a_live_module_keeps_its_dtype(tiny):
    load_model(tiny("Llama"), dtype="float32")
    with pytest.raises(ModelError, match=r"dtype='bfloat16'.*module\.to"):
        load_model(tiny("Llama"), dtype="bfloat16")


@pytest.mark.parametrize("dtype, expected", [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_a_directory(tiny, packer, tmp_path, dtype, expected):
    module = tiny("Llama").bfloat16()
    module.save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path), dtype=dtype)
    assert tokenizer is None
    assert model.module.dtype == expected
    assert model.end_token_ids == (2,)
    same = first_logits(load_model(module)[0], packer, [5, 6, 7])
    torch.testing.assert_close(first_logits(model, packer, [5, 6, 7]), same, rtol=0, atol=0.1 * float(same.std()))


def test_a_gguf_file(tiny_gguf, packer):
    path, module = tiny_gguf
    model, tokenizer = load_model(path)
    assert model.module.dtype == torch.float32
    assert model.end_token_ids == (0, 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234 12", add_special_tokens=False)["input_ids"]) == [
        *"1234",
        "Ġ",
        *"12",
    ]
    expected = first_logits(load_model(module)[0], packer, [5, 6, 7, 8])
    torch.testing.assert_close(first_logits(model, packer, [5, 6, 7, 8]), expected, rtol=0, atol=1e-4)


def test_digits_are_left_alone_where_the_vocabulary_joins_them():
    tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(pre_tokenizer="as it was"))
    for pre in (None, "gpt-2", "llama-bpe"):
        gguf.restore_digits(tokenizer, pre)
    assert tokenizer.backend_tokenizer.pre_tokenizer == "as it was"


@pytest.mark.parametrize(
    "name, says",
    [
        ("./nowhere", "no such file or directory"),
        ("/nowhere/at/all", "no such file or directory"),
        ("nowhere.gguf", "no such file or directory"),
        ("two words", "no such file or directory"),
    ],
)
def test_an_unknown_model_tells_the_ways_out(name, says):
    with pytest.raises(ModelError, match=says) as caught:
        load_model(name)
    for way in ("smollm2", "config.json", "GGUF", "hub id", "live"):
        assert way in str(caught.value)


def test_an_unknown_hub_id_tells_what_was_tried(monkeypatch):
    import transformers

    def missing(name, **options):
        raise OSError("we could not reach it\nand more")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", missing)
    with pytest.raises(ModelError, match=r"neither 'smollm2' nor a file or directory.*could not reach it"):
        load_model("someone/something")


def test_an_empty_directory_is_no_model(tmp_path):
    with pytest.raises(ModelError, match="as a directory it does not load"):
        load_model(tmp_path)


def test_other_files_and_dtypes_are_refused(tmp_path, tiny):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match="GGUF"):
        load_model(tmp_path / "model.bin")
    (tmp_path / "broken.gguf").write_bytes(b"nothing of that kind")
    with pytest.raises(ModelError, match="cannot read this GGUF"):
        load_model(tmp_path / "broken.gguf")
    with pytest.raises(ModelError, match="float32, bfloat16, float16"):
        load_model(tiny("Llama"), dtype="int8")


def test_a_missing_package_names_the_extra():
    with pytest.raises(MissingExtra, match=r"klero\[engine\]"):
        require("no_such_package_anywhere")


def test_importing_the_package_imports_no_torch():
    code = "import sys, klero.engine.models; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_the_default_model_is_converted_once(tiny_gguf, monkeypatch, tmp_path):
    path, _ = tiny_gguf
    monkeypatch.setenv("KLERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "installed_gguf", lambda: path)
    calls = []
    load = gguf.load
    monkeypatch.setattr(gguf, "load", lambda *a: (calls.append(a), load(*a))[1])
    first, tokenizer = load_model("smollm2")
    again, _ = load_model("smollm2", dtype="bfloat16")
    assert len(calls) == 1
    assert first.module.dtype == torch.float32
    assert again.module.dtype == torch.bfloat16
    assert first.end_token_ids == again.end_token_ids == (0, 2)
    assert len(tokenizer("1234", add_special_tokens=False)["input_ids"]) == 4
