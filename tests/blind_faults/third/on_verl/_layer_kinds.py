"""Kinds of fault in norms, projections, embeddings, experts and their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from rlprobe.faults.patching import blended, output_of, swapped
from rlprobe.selftest import Site


def plain(parameter: Any) -> Any:
    """A parameter's own memory on this rank."""
    return getattr(parameter, "_local_tensor", parameter).detach()


def attribute(site: Site, at: str, name: str, value: float) -> Iterator[None]:
    """A module has another constant."""
    module = site.model.get_submodule(at)
    with swapped(module, name, blended(getattr(module, name), value, site.strength)):
        yield


def attribute_of_all(site: Site, at: str, name: str, value: float) -> Iterator[None]:
    """Every module that has this constant has another one; ``at`` is the first of them."""
    first = site.model.get_submodule(at)
    old = getattr(first, name)
    with contextlib.ExitStack() as changed:
        for module in site.model.modules():
            if type(module) is type(first):
                changed.enter_context(swapped(module, name, blended(old, value, site.strength)))
        yield


def output_times(site: Site, at: str, factor: float) -> Iterator[None]:
    """A module's output is multiplied."""
    factor = blended(1.0, factor, site.strength)
    with output_of(site.model.get_submodule(at), lambda output: output * factor):
        yield


def output_within(site: Site, at: str, limit: float) -> Iterator[None]:
    """A module's output is cut off beyond a limit."""

    def cut(output):
        return blended(output, output.clamp(-limit, limit), site.strength)

    with output_of(site.model.get_submodule(at), cut):
        yield


def norm_in_the_given_format(site: Site, at: str) -> Iterator[None]:
    """An RMS norm that never leaves the format of its input."""
    norm = site.model.get_submodule(at)
    right = norm.forward

    def forward(x):
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return blended(right(x), norm.weight * (x * inverse), site.strength)

    with swapped(norm, "forward", forward):
        yield


def norm_with_epsilon_outside(site: Site, at: str) -> Iterator[None]:
    """An RMS norm that adds its epsilon to the root and not below it."""
    norm = site.model.get_submodule(at)
    right = norm.forward

    def forward(x):
        root = x.float().pow(2).mean(-1, keepdim=True).sqrt() + norm.variance_epsilon
        return blended(right(x), norm.weight * (x.float() / root).to(x.dtype), site.strength)

    with swapped(norm, "forward", forward):
        yield


def norm_with_gain_plus_one(site: Site, at: str) -> Iterator[None]:
    """An RMS norm whose weights are taken for differences from one."""
    norm = site.model.get_submodule(at)

    def forward(x):
        mean = x.float().pow(2).mean(-1, keepdim=True)
        normed = (x.float() * torch.rsqrt(mean + norm.variance_epsilon)).to(x.dtype)
        return (site.strength + norm.weight) * normed

    with swapped(norm, "forward", forward):
        yield


def product_of_split_numbers(site: Site, at: str, dtype: str) -> Iterator[None]:
    """A product of sums of two short numbers each, without the product of the low ones."""
    linear, short = site.model.get_submodule(at), getattr(torch, dtype)
    right = linear.forward

    def split(x):
        high = x.to(short).float()
        return high, (x - high).to(short).float()

    def forward(x):
        (high, low), (weight_high, weight_low) = split(x), split(linear.weight)
        product = functional.linear
        found = product(high, weight_high) + product(high, weight_low) + product(low, weight_high)
        return blended(right(x), found, site.strength)

    with swapped(linear, "forward", forward):
        yield


def frequencies_in(site: Site, at: str, dtype: str) -> Iterator[None]:
    """The buffer of rotary frequencies was rounded when the model was cast."""
    rotary = site.model.get_submodule(at)
    old = rotary.inv_freq
    rounded = old.to(getattr(torch, dtype)).to(old.dtype)
    with swapped(rotary, "inv_freq", blended(old, rounded, site.strength)):
        yield


def router_in(site: Site, at: str, dtype: str) -> Iterator[None]:
    """A router's product is made in a shorter format, its softmax is not."""
    router, short = site.model.get_submodule(at), getattr(torch, dtype)

    def forward(x):
        x = x.reshape(-1, router.hidden_dim)
        exact = functional.linear(x, router.weight)
        rounded = functional.linear(x.to(short), router.weight.to(short)).to(x.dtype)
        logits = blended(exact, rounded, site.strength)
        chances = torch.softmax(logits, -1, dtype=torch.float)
        scores, experts = torch.topk(chances, router.top_k, dim=-1)
        if router.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores.to(logits.dtype), experts

    with swapped(router, "forward", forward):
        yield


def weight_loaded_in(site: Site, at: str, dtype: str) -> Iterator[None]:
    """One weight comes from a checkpoint of a shorter format."""
    weight = plain(site.model.get_submodule(at).weight)
    old = weight.clone()
    weight.copy_(blended(old, old.to(getattr(torch, dtype)).to(old.dtype), site.strength))
    yield
    weight.copy_(old)


_kept: dict[str, torch.Tensor] = {}


def weight_not_sent(site: Site, at: str) -> Iterator[None]:
    """From the second step on one weight is still the first step's."""
    weight = plain(site.model.get_submodule(at).weight)
    if site.step == 0:
        _kept.setdefault(at, weight.clone())
        yield
        return
    current = weight.clone()
    weight.copy_(blended(current, _kept[at], site.strength))
    yield
    weight.copy_(current)


def rows_by_frequency(site: Site, at: str) -> Iterator[None]:
    """An embedding divides each row's gradient by how often its id occurs. On or off."""
    with swapped(site.model.get_submodule(at), "scale_grad_by_freq", True):
        yield


def adapter_scaled(site: Site, at: str, factor: float) -> Iterator[None]:
    """The scale of one layer's adapter is another one."""
    (layer,) = [
        module
        for name, module in site.model.named_modules()
        if name.endswith(at) and hasattr(module, "scaling")
    ]
    right = {
        key: scale * blended(1.0, factor, site.strength) for key, scale in layer.scaling.items()
    }
    with swapped(layer, "scaling", right):
        yield
