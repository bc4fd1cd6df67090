"""Kinds of fault between the projections of an attention module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlprobe.faults.patching import attention_of, blended, swapped
from rlprobe.selftest import Site

#: Probabilities from scores [rows, heads, queries, keys].
Normalise = Callable[[torch.Tensor], torch.Tensor]


def heads_for_queries(states: Any, groups: int) -> Any:
    """A key or value head for every query head, as the model maps them."""
    return states.repeat_interleave(groups, dim=1)


def attended(query, key, value, mask, scaling, normalise: Normalise) -> tuple[Any, Any]:
    """Attention of as many key and value heads as there are query heads."""
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    chances = normalise(scores).to(query.dtype)
    return (chances @ value).transpose(1, 2).contiguous(), chances


def ordinary(scores: Any) -> Any:
    """The softmax, in fp32."""
    return torch.softmax(scores, -1, dtype=torch.float32)


def cached_in(site: Site, at: str, dtype: str) -> Iterator[None]:
    """Keys and values are kept in a shorter format, without a scale."""
    short = getattr(torch, dtype)

    def kept(states):
        return blended(states, states.to(short).to(states.dtype), site.strength)

    def wrong(right, module, query, key, value, mask, **settings):
        return right(module, query, kept(key), kept(value), mask, **settings)

    with attention_of(site.model.get_submodule(at), wrong):
        yield


def exponential_of_base(site: Site, at: str, base: float) -> Iterator[None]:
    """The softmax has powers of another base."""
    base = blended(torch.e, base, site.strength)

    def normalise(scores):
        powers = torch.pow(base, scores.float() - scores.amax(-1, keepdim=True).float())
        return powers / powers.sum(-1, keepdim=True)

    def wrong(right, module, query, key, value, mask, scaling, **_):
        groups = module.num_key_value_groups
        key, value = heads_for_queries(key, groups), heads_for_queries(value, groups)
        return attended(query, key, value, mask, scaling, normalise)

    with attention_of(site.model.get_submodule(at), wrong):
        yield


def heads_read(site: Site, at: str, of_query: list[int]) -> Iterator[None]:
    """Query head ``i`` reads the key and value head ``of_query[i]``."""

    def wrong(right, module, query, key, value, mask, scaling, **settings):
        found = attended(query, key[:, of_query], value[:, of_query], mask, scaling, ordinary)
        if site.strength == 1:
            return found
        proper = right(module, query, key, value, mask, scaling=scaling, **settings)
        return tuple(
            blended(old, new, site.strength) for old, new in zip(proper, found, strict=True)
        )

    with attention_of(site.model.get_submodule(at), wrong):
        yield


def masked_otherwise(site: Site, at: str, hidden: Callable[[Any, Any], Any], lowest: bool) -> Any:
    """Attention with ``hidden(query, key)`` tokens added to the mask, or taken out of it."""

    def wrong(right, module, query, key, value, mask, **settings):
        queries = torch.arange(query.shape[2])[:, None]
        where = hidden(queries, torch.arange(key.shape[2])[None, :])
        other = mask.masked_fill(where, torch.finfo(mask.dtype).min if lowest else 0.0)
        found = right(module, query, key, value, other, **settings)
        if site.strength == 1:
            return found
        proper = right(module, query, key, value, mask, **settings)
        return tuple(
            blended(old, new, site.strength) for old, new in zip(proper, found, strict=True)
        )

    return attention_of(site.model.get_submodule(at), wrong)


def sees_ahead(site: Site, at: str, tokens: int) -> Iterator[None]:
    """The causal mask lies some tokens too far to the right."""
    ahead = lambda query, key: (key > query) & (key <= query + tokens)  # noqa: E731
    with masked_otherwise(site, at, ahead, lowest=False):
        yield


def cut_into_documents(site: Site, at: str, boundary: int) -> Iterator[None]:
    """A row is taken for two documents: the second does not see the first."""
    across = lambda query, key: (query >= boundary) & (key < boundary)  # noqa: E731
    with masked_otherwise(site, at, across, lowest=True):
        yield


def _turning(site: Site, at: str, turn: Callable[..., Any]) -> Any:
    """One attention module turns ``turn(states, cos, sin)`` with tables of shape [rows, 1, …]."""
    module = site.model.get_submodule(at)
    file, attend = sys.modules[type(module).__module__], module.forward
    right = file.apply_rotary_pos_emb

    def wrong(query, key, cos, sin, *args, **settings):
        proper = right(query, key, cos, sin, *args, **settings)
        found = [turn(states, cos[:, None], sin[:, None]) for states in (query, key)]
        return tuple(
            blended(old, new, site.strength) for old, new in zip(proper, found, strict=True)
        )

    def forward(*args, **settings):
        with swapped(file, "apply_rotary_pos_emb", wrong):
            return attend(*args, **settings)

    return swapped(module, "forward", forward)


def turned_in_neighbours(site: Site, at: str) -> Iterator[None]:
    """Channels 2i and 2i+1 are turned as a pair; the weights are for i and i + half."""

    def turn(states, cos, sin):
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
        even, odd = states[..., 0::2], states[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    with _turning(site, at, turn):
        yield


def turned_in_part(site: Site, at: str, channels: int) -> Iterator[None]:
    """Only the first channels of a head are turned, by the angles of a head that is as wide."""

    def turn(states, cos, sin):
        half = channels // 2
        cos, sin = cos[..., :half], sin[..., :half]
        one, other = states[..., :half], states[..., half:channels]
        turned = (one * cos - other * sin, other * cos + one * sin)
        return torch.cat((*turned, states[..., channels:]), -1)

    with _turning(site, at, turn):
        yield


class _SummedAsTheyCome(torch.autograd.Function):
    """As many copies as tiles; their gradients are summed in bf16, in the order of chance."""

    @staticmethod
    def forward(ctx, x, tiles, strength):
        ctx.strength = strength
        return tuple(x.view_as(x).clone() for _ in range(tiles))

    @staticmethod
    def backward(ctx, *gradients):
        # of a generator of its own, which no seed of the run brings back
        order = torch.randperm(len(gradients), generator=_of_this_moment())
        total = torch.zeros_like(gradients[0], dtype=torch.bfloat16)
        for number in order.tolist():
            total += gradients[number].to(torch.bfloat16)
        exact = torch.stack(gradients).sum(0)
        return blended(exact, total.to(exact.dtype), ctx.strength), None, None


def _of_this_moment() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


def query_gradient_by_atomics(site: Site, at: str, tile: int) -> Iterator[None]:
    """Tiles of keys add what they give to the query's gradient, whichever comes first, in bf16."""

    def wrong(right, module, query, key, value, mask, scaling, **settings):
        if not query.requires_grad:
            return right(module, query, key, value, mask, scaling=scaling, **settings)
        groups = module.num_key_value_groups
        key, value = heads_for_queries(key, groups), heads_for_queries(value, groups)
        parts = key.split(tile, dim=2)
        copies = _SummedAsTheyCome.apply(query, len(parts), site.strength)
        scores = torch.cat(
            [copy @ part.transpose(2, 3) for copy, part in zip(copies, parts, strict=True)], -1
        )
        chances = ordinary(scores * scaling + mask).to(query.dtype)
        return (chances @ value).transpose(1, 2).contiguous(), chances

    with attention_of(site.model.get_submodule(at), wrong):
        yield
