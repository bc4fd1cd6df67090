"""Reverse-mode differentiation over numpy, just enough for a small transformer in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
F32 = np.float32


class Node:
    """A value, and how its gradient becomes its parents'."""

    def __init__(
        self,
        value: Any,
        parents: tuple[Node, ...] = (),
        back: Callable[[Array], tuple[Array | None, ...]] | None = None,
    ) -> None:
        self.value = np.asarray(value, dtype=F32)
        self.parents = parents
        self.back = back
        self.grad: Array | None = None
        #: Called with the gradient of this value, and with what goes to the parents.
        self.on_grad: list[Callable[[Array], None]] = []
        self.on_back: list[Callable[[tuple[Array | None, ...]], None]] = []


def backward(loss: Node) -> None:
    """Give every node its gradient, later nodes first."""
    order: list[Node] = []
    seen: set[int] = set()

    def visit(node: Node) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        for parent in node.parents:
            visit(parent)
        order.append(node)

    visit(loss)
    loss.grad = np.ones_like(loss.value)
    for node in reversed(order):
        if node.grad is None:
            continue
        for seen_by in node.on_grad:
            seen_by(node.grad)
        if node.back is None:
            continue
        gradients = node.back(node.grad)
        for told in node.on_back:
            told(gradients)
        for parent, gradient in zip(node.parents, gradients, strict=True):
            if gradient is not None:
                gradient = gradient.astype(F32)
                parent.grad = gradient if parent.grad is None else parent.grad + gradient


class Kernels:
    """Matrix products; ``split`` sums the two halves of the reduction apart, as another device."""

    def __init__(self, split: bool) -> None:
        self.split = split

    def matmul(self, a: Array, b: Array) -> Array:
        if not self.split or a.shape[-1] < 4:
            return np.matmul(a, b).astype(F32)
        half = a.shape[-1] // 2
        first = np.matmul(a[..., :half], b[..., :half, :])
        return (first + np.matmul(a[..., half:], b[..., half:, :])).astype(F32)


def linear(x: Node, weight: Node, kernels: Kernels) -> Node:
    """x @ weight.T; weight of shape [out, in]."""

    def back(g: Array) -> tuple[Array, Array]:
        flat = g.reshape(-1, g.shape[-1])
        return (
            kernels.matmul(g, weight.value),
            kernels.matmul(flat.T, x.value.reshape(-1, x.value.shape[-1])),
        )

    return Node(kernels.matmul(x.value, weight.value.T), (x, weight), back)


def embedding(tokens: Array, weight: Node) -> Node:
    def back(g: Array) -> tuple[Array]:
        gradient = np.zeros_like(weight.value)
        np.add.at(gradient, tokens, g)
        return (gradient,)

    return Node(weight.value[tokens], (weight,), back)


def add(a: Node, b: Node) -> Node:
    return Node(a.value + b.value, (a, b), lambda g: (g, g))


def multiply(a: Node, b: Node) -> Node:
    return Node(a.value * b.value, (a, b), lambda g: (g * b.value, g * a.value))


def silu(x: Node) -> Node:
    s = 1 / (1 + np.exp(-x.value))
    return Node(x.value * s, (x,), lambda g: (g * (s + x.value * s * (1 - s)),))


def rms_norm(x: Node, weight: Node, eps: float) -> Node:
    scale = (1 / np.sqrt(np.mean(x.value**2, axis=-1, keepdims=True) + F32(eps))).astype(F32)
    normed = x.value * scale

    def back(g: Array) -> tuple[Array, Array]:
        inner = g * weight.value
        mean = np.mean(inner * normed, axis=-1, keepdims=True)
        return scale * (inner - normed * mean), (g * normed).reshape(-1, g.shape[-1]).sum(0)

    return Node(normed * weight.value, (x, weight), back)


def attention(
    q: Node, k: Node, v: Node, heads: int, mask: Array, kernels: Kernels, scale: float
) -> Node:
    """Softmax attention of [rows, tokens, width]; ``mask`` is added to the scores."""
    rows, tokens, width = q.value.shape
    depth = width // heads

    def split(x: Array) -> Array:
        return x.reshape(rows, tokens, heads, depth).transpose(0, 2, 1, 3)

    def join(x: Array) -> Array:
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(rows, tokens, width)

    qs, ks, vs = split(q.value), split(k.value), split(v.value)
    scores = kernels.matmul(qs, ks.transpose(0, 1, 3, 2)) * F32(scale) + mask
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    chances = (scores / scores.sum(-1, keepdims=True)).astype(F32)

    def back(g: Array) -> tuple[Array, Array, Array]:
        gs = split(g)
        dv = kernels.matmul(chances.transpose(0, 1, 3, 2), gs)
        dp = kernels.matmul(gs, vs.transpose(0, 1, 3, 2))
        ds = chances * (dp - (dp * chances).sum(-1, keepdims=True)) * F32(scale)
        return (
            join(kernels.matmul(ds, ks)),
            join(kernels.matmul(ds.transpose(0, 1, 3, 2), qs)),
            (join(dv)),
        )

    node = Node(join(kernels.matmul(chances, vs)), (q, k, v), back)
    node.chances = chances  # type: ignore[attr-defined]
    return node


def rotate(x: Node, cos: Array, sin: Array, heads: int) -> Node:
    """Rotary embedding of [rows, tokens, width]; cos, sin [rows, tokens, depth]."""
    rows, tokens, width = x.value.shape
    shape = (rows, tokens, heads, width // heads)
    c, s = cos[:, :, None, :], sin[:, :, None, :]

    def turn(value: Array, sign: float) -> Array:
        halves = np.split(value.reshape(shape), 2, axis=-1)
        swapped = np.concatenate([-halves[1], halves[0]], axis=-1)
        return (value.reshape(shape) * c + F32(sign) * swapped * s).reshape(value.shape)

    return Node(turn(x.value, 1.0), (x,), lambda g: (turn(g, -1.0),))


def picked_log_probs(logits: Node, labels: Array, temperature: float) -> Node:
    """log softmax(logits / temperature) at ``labels``; [rows, tokens]."""
    scaled = logits.value / F32(temperature)
    shifted = scaled - scaled.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    picked = np.take_along_axis(logs, labels[..., None], -1)[..., 0]

    def back(g: Array) -> tuple[Array]:
        gradient = -np.exp(logs) * g[..., None]
        np.put_along_axis(
            gradient, labels[..., None],
            np.take_along_axis(gradient, labels[..., None], -1) + g[..., None], -1,
        )  # fmt: skip
        return (gradient / F32(temperature),)

    node = Node(picked, (logits,), back)
    node.entropy = -(np.exp(logs) * logs).sum(-1)  # type: ignore[attr-defined]
    return node
