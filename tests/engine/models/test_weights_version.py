"""A number that changes with the weights: which changes it sees, and which it does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from klero.engine.models.transformers import SAMPLED, TransformersModel


def sgd(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.01


def one_element(module):
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[40, 20] += 1


def fused(module):
    """Torch counts no change of its fused optimizers."""
    versions = [parameter._version for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True).step()
    assert versions == [parameter._version for parameter in module.parameters()]


def through_data(module):
    for parameter in module.parameters():
        parameter.data.mul_(1.001)


def through_numpy(module):
    module.model.norm.weight.detach().numpy()[...] *= 2


def new_data(module):
    module.model.norm.weight.data = module.model.norm.weight.data.clone()


def new_parameter(module):
    module.model.norm.weight = torch.nn.Parameter(module.model.norm.weight.detach().clone())


def new_module(module):
    module.lm_head = torch.nn.Linear(32, 97, bias=False)


def loaded(module):
    module.load_state_dict(module.state_dict())


def a_buffer(module):
    module.model.rotary_emb.inv_freq.mul_(2)


SEEN = [sgd, one_element, fused, through_data, through_numpy, new_data, new_parameter, new_module, loaded, a_buffer]


@pytest.mark.parametrize("change", SEEN)
def test_a_change_is_seen(tiny, change):
    model = TransformersModel(tiny("Llama"), deterministic=False)
    before = model.weights_version()
    change(model.module)
    assert model.weights_version() != before


def test_what_changes_no_weight_is_no_change(tiny, packer):
    model = TransformersModel(tiny("Llama"), deterministic=False)
    model.allocate(8, 4)
    before = model.weights_version()
    p = packer(8, 4)
    p.join(0)
    model.forward(p.step([(0, np.arange(6))]))
    assert model.hidden_size == 32
    model.module.set_attn_implementation("sdpa")
    model.module.train()
    model.module(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    assert model.weights_version() == before


def test_what_is_not_seen(tiny):
    """Behind torch's back, and none of the elements that are looked at."""
    model = TransformersModel(tiny("Llama"), deterministic=False)
    before = model.weights_version()
    model.module.model.embed_tokens.weight.data.view(-1)[SAMPLED] += 1
    assert model.weights_version() == before
    model.module.model.embed_tokens.weight.data.view(-1)[SAMPLED - 1] += 1
    assert model.weights_version() != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_layouts(tiny, dtype):
    module = tiny("Llama").to(dtype)
    module.model.norm.weight = torch.nn.Parameter(torch.ones(3, 32, dtype=dtype).T[:, 0])  # not contiguous
    module.register_buffer("expanded", torch.zeros(1).expand(40))  # fewer elements in memory than in the tensor
    module.register_buffer("nothing", None)
    with torch.inference_mode():
        module.register_buffer("uncounted", torch.ones(3))
    model = TransformersModel.__new__(TransformersModel)
    model.module = module
    before = model.weights_version()
    assert model.weights_version() == before
    module.lm_head.weight.data[0, 0] += 1
    assert model.weights_version() != before
