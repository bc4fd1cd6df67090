"""What a correct device may do otherwise."""

import sys

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


def _file(site):
    m = site.model.get_submodule("model.layers.0.self_attn")
    return sys.modules[type(m).__module__]


@benign()
def attention_in_blocks_of_keys(site: Site):
    def attention(module, query, key, value, mask, scaling, **kwargs):
        n = module.num_key_value_groups
        k, v = key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)
        top = torch.full_like(query[..., :1], -1e30)
        weight, out = torch.zeros_like(top), torch.zeros_like(query)
        for first in range(0, k.shape[2], 16):
            part = slice(first, first + 16)
            s = query @ k[:, :, part].transpose(2, 3) * scaling
            s = s if mask is None else s + mask[..., part]
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            e, old = torch.exp(s - new), torch.exp(top - new)
            weight = weight * old + e.sum(-1, keepdim=True)
            out, top = out * old + e @ v[:, :, part], new
        return (out / weight).transpose(1, 2).contiguous(), None

    with swapped(_file(site), "eager_attention_forward", attention):
        yield


@benign()
def products_summed_from_the_end(site: Site):
    right = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        return right(x.flip(-1), weight.flip(-1), bias)

    with swapped(torch.nn.functional, "linear", linear):
        yield


@benign()
def rotation_by_complex_numbers_in_double(site: Site):
    def rotate(q, k, cos, sin, *args, **kwargs):
        half = cos.shape[-1] // 2
        turn = torch.complex(cos[..., :half].double(), sin[..., :half].double()).unsqueeze(1)

        def turned(x):
            y = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
            return torch.cat((y.real, y.imag), -1).to(x.dtype)

        return turned(q), turned(k)

    with swapped(_file(site), "apply_rotary_pos_emb", rotate):
        yield


@benign()
def silu_by_hyperbolic_tangent(site: Site):
    def silu(x, inplace=False):
        return 0.5 * x * (1 + torch.tanh(0.5 * x))

    with swapped(torch.nn.functional, "silu", silu):
        yield


@benign()
def losses_summed_in_double(site: Site):
    import verl.utils.torch_functional as functional

    right = functional.masked_sum

    def summed(values, mask, *args, **kwargs):
        return right(values.double(), mask, *args, **kwargs).to(values.dtype)

    with swapped(functional, "masked_sum", summed):
        yield


@benign(needs={"updates": 2})
def gradient_norm_in_double(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine.fsdp2_clip_grad_norm_

    def clip(parameters, max_norm, **kwargs):
        parameters = list(parameters)
        right(parameters, float("inf"), **kwargs)
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
        total = sum(d.double().pow(2).sum() for d in grads if d is not None).sqrt()
        for d in grads:
            if d is not None:
                d.mul_((max_norm / (total + 1e-6)).clamp(max=1.0).to(d.dtype))
        return total.float()

    with swapped(engine, "fsdp2_clip_grad_norm_", clip):
        yield
