"""What a correct device may do otherwise."""

import sys

import torch
from _shared import log_probs, stepped_anew

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign()
def scores_summed_over_halves_of_a_head(site: Site):
    m = site.model.get_submodule("model.layers.0.self_attn")
    file = sys.modules[type(m).__module__]

    def attention(module, query, key, value, mask, scaling, **kwargs):
        n = module.num_key_value_groups
        k, v = key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)
        half = query.shape[-1] // 2
        s = query[..., half:] @ k[..., half:].transpose(2, 3)
        s = (s + query[..., :half] @ k[..., :half].transpose(2, 3)) * scaling
        p = torch.softmax(s if mask is None else s + mask, -1, dtype=torch.float32)
        return (p.to(v.dtype) @ v).transpose(1, 2).contiguous(), p

    with swapped(file, "eager_attention_forward", attention):
        yield


@benign(needs={"model": "llama"})
def swiglu_in_double(site: Site):
    def silu(x, inplace=False):
        wide = x.double()
        return (wide * torch.sigmoid(wide)).to(x.dtype)

    with swapped(torch.nn.functional, "silu", silu):
        yield


@benign()
def log_sum_of_two_shards(site: Site):
    def change(right, logits, labels):
        one, other = (torch.logsumexp(part, -1) for part in logits.chunk(2, -1))
        return logits.gather(-1, labels[..., None])[..., 0] - torch.logaddexp(one, other)

    with log_probs(change):
        yield


@benign(needs={"updates": 2})
def adam_by_its_formula(site: Site):
    def moved(average, square, step, settings):
        b1, b2 = settings["beta1"], settings["beta2"]
        root = (square.double() / (1 - b2**step)).sqrt() + settings["eps"]
        return (average.double() / (1 - b1**step) / root).to(average.dtype)

    with stepped_anew(moved):
        yield


class _TwoHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.nn.functional.linear(x, w)

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        rows, columns = d.reshape(-1, d.shape[-1]), x.reshape(-1, x.shape[-1])
        half = len(rows) // 2
        split = rows[half:].t() @ columns[half:] + rows[:half].t() @ columns[:half]
        return d @ w, split


@benign()
def weight_gradients_in_two_halves(site: Site):
    m = site.model.get_submodule("model.layers.1.mlp.down_proj")
    with swapped(m, "forward", lambda x: _TwoHalves.apply(x, m.weight)):
        yield
