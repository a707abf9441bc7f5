"""Embeddings in place of ids: of ids, they give the logits of the ids; and modules that cannot are found out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.engine.models.test_architectures import ARCHITECTURES, QUICK, tiny_model

from klero.engine.models.checked import CHECKED
from klero.engine.models.transformers import TransformersModel
from klero.errors import ModelError


def embedded(step, module, chosen):
    """The same step with the chosen tokens as embeddings, and placeholders in place of their ids."""
    with torch.inference_mode():
        embeds = module.get_input_embeddings()(torch.from_numpy(step.input_ids).long()).float().numpy()
    ids, embeds = step.input_ids.copy(), embeds.copy()
    ids[chosen], embeds[~chosen] = 0, 0
    return dataclasses.replace(step, input_ids=ids, inputs_embeds=embeds, is_embedded=chosen)


def some_steps(packer):
    """A prefill beside half a prefill, then a decode beside the other half."""
    p = packer(16, 4)
    p.join(0)
    p.join(1)
    yield p.step([(0, np.arange(3, 12)), (1, np.arange(20, 27))])
    yield p.step([(1, np.arange(27, 32)), (0, np.arange(50, 51))])


def test_the_embeddings_of_ids_give_the_logits_of_the_ids(tiny, packer):
    """In bits: all tokens as embeddings, some of them, and one."""
    model = TransformersModel(tiny("Llama"), deterministic=True)
    assert model.hidden_size == 32
    model.allocate(16, 4)
    expected = [model.forward(step) for step in some_steps(packer)]
    for choose in (lambda n: np.ones(n, bool), lambda n: np.arange(n) % 3 == 1, lambda n: np.arange(n) == n - 1):
        model.allocate(16, 4)
        for step, logits in zip(some_steps(packer), expected, strict=True):
            given = embedded(step, model.module, choose(len(step.input_ids)))
            assert torch.equal(model.forward(given), logits)


def test_other_embeddings_give_other_logits(tiny, packer):
    model = TransformersModel(tiny("Llama"))
    model.allocate(16, 4)
    step = next(some_steps(packer))
    given = embedded(step, model.module, np.ones(16, bool))
    given.inputs_embeds[4] += 0.5
    expected, found = model.forward(step), model.forward(given)
    differs = (expected != found).any(1)
    assert differs.tolist() == [4 <= t < 9 for t in range(16)]  # from it on, and in its own sequence alone


def test_half_precision_takes_its_own_embeddings_back(tiny, packer):
    """They come as float32, which holds them exactly."""
    model = TransformersModel(tiny("Llama").bfloat16(), deterministic=True)
    model.allocate(16, 4)
    step = next(some_steps(packer))
    given = embedded(step, model.module, np.arange(16) % 2 == 0)
    assert torch.equal(model.forward(given), model.forward(step))


@pytest.mark.parametrize("name", [architecture.name for architecture in CHECKED])
def test_every_checked_architecture_takes_them(named, name, packer):
    """Those included that scale embeddings inside, project them, or add positions that were learned."""
    module = tiny_model(named, name, ARCHITECTURES[name])
    model = TransformersModel(module, deterministic=False)
    assert model.hidden_size == module.get_input_embeddings().weight.shape[1], model._embeddings[1]
    model.allocate(16, 4)
    step = next(some_steps(packer))
    given = embedded(step, module, np.arange(16) % 3 != 1)
    torch.testing.assert_close(model.forward(given), model.forward(step), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sorted({"OPTForCausalLM"} & QUICK))
def test_the_width_is_that_of_the_table(named, name):
    """OPT may project its embeddings to the width of its layers."""
    changes = {**ARCHITECTURES[name], "word_embed_proj_dim": 16}
    assert TransformersModel(tiny_model(named, name, changes), deterministic=False).hidden_size == 16


def needs_ids_twice(module):
    """As architectures with tables of their own in each layer do."""
    inner = module.model.forward

    def forward(input_ids=None, inputs_embeds=None, **others):
        return inner(inputs_embeds=module.model.embed_tokens(input_ids % 97), **others)

    module.model.forward = forward


def does_something_to_ids_alone(module):
    inner = module.model.forward

    def forward(input_ids=None, inputs_embeds=None, **others):
        if inputs_embeds is None:
            inputs_embeds = module.model.embed_tokens(input_ids) * 1.5
        return inner(inputs_embeds=inputs_embeds, **others)

    module.model.forward = forward


def has_no_table(module):
    module.get_input_embeddings = lambda: None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "change, says",
    [
        (needs_ids_twice, "fails with embeddings in place of them: TypeError"),
        (does_something_to_ids_alone, "other logits than their ids"),
        (has_no_table, "TypeError"),
    ],
)
def test_a_module_that_takes_ids_only_is_found_out(tiny, packer, change, says, deterministic):
    module = tiny("Llama")
    change(module)
    model = TransformersModel(module, deterministic=deterministic)
    assert model.hidden_size is None
    model.allocate(16, 4)
    step = next(some_steps(packer))
    given = dataclasses.replace(step, inputs_embeds=np.zeros((16, 32), np.float32), is_embedded=np.ones(16, bool))
    with pytest.raises(ModelError, match=f"LlamaForCausalLM takes ids only.*{says}"):
        model.forward(given)
    assert model.forward(step).shape == (16, 97)  # ids go on


@pytest.mark.parametrize("deterministic", [False, True])
def test_bits_that_differ_are_enough(tiny, deterministic):
    """A scale of 1 + 2^-20, far within the tolerance of the probe at loading."""
    module = tiny("Llama")
    inner = module.model.forward

    def forward(input_ids=None, inputs_embeds=None, **others):
        if inputs_embeds is None:
            inputs_embeds = module.model.embed_tokens(input_ids) * (1 + 2**-20)
        return inner(inputs_embeds=inputs_embeds, **others)

    module.model.forward = forward
    model = TransformersModel(module, deterministic=deterministic)
    assert model.hidden_size is None
    assert "where rounding is the same" in model._embeddings[1]


def test_where_no_two_runs_agree_rounding_is_allowed(tiny):
    module = tiny("Llama")
    inner, scales = module.model.forward, iter(1 + 2.0**-20 * n for n in range(99))
    module.model.forward = lambda input_ids=None, inputs_embeds=None, **others: inner(
        inputs_embeds=(module.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds) * next(scales),
        **others,
    )
    assert TransformersModel(module, deterministic=False).hidden_size == 32


def test_an_architecture_that_looks_ids_up_in_every_layer(named):
    """Given embeddings, it leaves that out, and says nothing."""
    changes = {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0,
        "laurel_rank": 4, "altup_num_inputs": 2, "layer_types": ["full_attention"] * 3, "intermediate_size": [48] * 3,
        "activation_sparsity_pattern": [0.0] * 3, "altup_correct_scale": False,  # a fresh scale is 0 and hides it
    }  # fmt: skip
    model = TransformersModel(named("Gemma3nForCausalLM", **changes), deterministic=False)
    assert model.hidden_size is None
    assert "other logits than their ids" in model._embeddings[1]


def test_embeddings_of_another_width_are_refused(tiny, packer):
    model = TransformersModel(tiny("Llama"), deterministic=False)
    model.allocate(16, 4)
    step = next(some_steps(packer))
    given = dataclasses.replace(step, inputs_embeds=np.zeros((16, 30), np.float32), is_embedded=np.ones(16, bool))
    with pytest.raises(ModelError, match=r"width 30: those of LlamaForCausalLM have 32"):
        model.forward(given)


def test_the_probe_runs_once_and_leaves_the_cache_alone(tiny, packer, monkeypatch):
    from klero.engine.models import transformers

    model = TransformersModel(tiny("Llama"), deterministic=False)
    model.allocate(16, 4)
    steps = some_steps(packer)
    model.forward(next(steps))
    held = [layer.keys.clone() for layer in model._cache.layers.values()]
    assert model.hidden_size == 32
    monkeypatch.setattr(transformers, "embedding_width", lambda *_, **__: pytest.fail("probed again"))
    assert model.hidden_size == 32
    assert all(torch.equal(keys, layer.keys) for keys, layer in zip(held, model._cache.layers.values(), strict=True))
