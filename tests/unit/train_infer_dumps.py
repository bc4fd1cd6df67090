"""Dumps of one model as a trainer and as an inference engine lay them out: a few modules, real
numbers, every token causal on those before it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.msprobe.tensors import write

HIDDEN, HEADS, GROUPS, SIZE, INNER, VOCABULARY = 8, 4, 2, 2, 8, 50
#: Prompts and responses of three samples; the first prompt was sampled twice.
SAMPLES = [([5, 6, 7], [20, 21]), ([8, 9], [22]), ([5, 6, 7], [23]), ([11, 12, 13, 14], [24, 25])]
Activations = dict[str, Tensor]


def model(tokens: Sequence[int], seed: int = 0) -> Activations:
    """Activations [tokens, width] of one sequence by what they are."""
    g = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) / columns**0.5

    table = torch.randn(VOCABULARY, HIDDEN, generator=g)
    x = table[torch.tensor(tokens)]
    found: Activations = {"embed": x}
    for layer in range(2):
        at = f"{layer}."
        norm = x / x.pow(2).mean(-1, keepdim=True).sqrt()
        q = norm @ weight(HEADS * SIZE, HIDDEN).T
        k = norm @ weight(GROUPS * SIZE, HIDDEN).T
        v = norm @ weight(GROUPS * SIZE, HIDDEN).T
        seen = torch.cumsum(v.repeat(1, HEADS // GROUPS) * q.sigmoid(), 0)
        o = (seen / torch.arange(1, len(tokens) + 1)[:, None]) @ weight(HIDDEN, HEADS * SIZE).T
        middle = x + o
        gate, up = middle @ weight(INNER, HIDDEN).T, middle @ weight(INNER, HIDDEN).T
        down = (gate.sigmoid() * up) @ weight(HIDDEN, INNER).T
        found |= {at + n: value for n, value in (
            ("in", x), ("norm", norm), ("q", q), ("k", k), ("v", v), ("o", o), ("middle", middle),
            ("gate", gate), ("up", up), ("down", down), ("out", middle + down))}  # fmt: skip
        x = middle + down
    return found


@dataclass(frozen=True)
class Batch:
    """Sequences of one pass, with an error in one module's output."""

    sequences: Sequence[Sequence[int]]
    #: By name of :func:`model`: what a device makes of it.
    errors: dict[str, Callable[[Tensor], Tensor]]

    def activations(self) -> list[Activations]:
        found = [model(tokens) for tokens in self.sequences]
        for name, change in self.errors.items():
            found = [{**a, name: change(a[name])} for a in found]
        return found


Lay = Callable[[Sequence[Tensor]], Tensor]


def _padded(width: int, left: Sequence[int]) -> Lay:
    """[rows, width, …]; padding holds garbage."""

    def lay(parts: Sequence[Tensor]) -> Tensor:
        shape = (len(parts), width, *parts[0].shape[1:])
        kind = parts[0].dtype
        out = torch.full(shape, 99 if kind == torch.float32 else 0, dtype=kind)
        for row, part in enumerate(parts):
            out[row, left[row] : left[row] + len(part)] = part
        return out

    return lay


def hugging_face(batch: Batch, call: int, pad: int = 4, wrapper: str = "") -> dict[str, Any]:
    """A padded batch, prompts to the left: [rows, length, hidden]."""
    lengths = [len(tokens) for tokens in batch.sequences]
    left = [pad - min(pad, n - 2) for n in lengths]
    width = pad + max(lengths)
    lay = _padded(width, left)
    positions = lay([torch.arange(n) for n in lengths])
    return _trainer(batch, call, lay, positions, wrapper)


def packed(batch: Batch, call: int) -> dict[str, Any]:
    """Sequences end to end: [1, tokens, hidden]."""

    def lay(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[None]

    return _trainer(batch, call, lay, lay([torch.arange(len(t)) for t in batch.sequences]), "")


def _trainer(batch: Batch, call: int, lay: Lay, positions: Tensor, wrapper: str) -> dict[str, Any]:
    parts = batch.activations()

    def of(name: str) -> Tensor:
        return lay([p[name] for p in parts])

    def module(path: str, cls: str) -> str:
        path = re.sub(r"(layers\.\d\.)", rf"\1{wrapper}", path)
        return f"Module.{wrapper}model.{path}.{cls}.forward.{call}"

    ids = lay([torch.tensor(tokens) for tokens in batch.sequences])
    calls: dict[str, Any] = {
        module("embed_tokens", "Embedding"): ([ids], [of("embed")]),
        module("rotary_emb", "Rotary"): ([of("embed"), positions], []),
    }
    for n in range(2):
        at, layer = f"{n}.", f"layers.{n}"
        calls |= {
            module(f"{layer}.input_layernorm", "RMSNorm"): ([of(at + "in")], [of(at + "norm")]),
            **{
                module(f"{layer}.self_attn.{p}_proj", "Linear"): ([of(at + "norm")], [of(at + p)])
                for p in "qkv"
            },
            module(f"{layer}.self_attn", "Attention"): ([], [of(at + "o")]),
            module(f"{layer}.post_attention_layernorm", "RMSNorm"): (
                [of(at + "middle")], [of(at + "middle")]),
            module(f"{layer}.mlp.gate_proj", "Linear"): ([of(at + "middle")], [of(at + "gate")]),
            module(f"{layer}.mlp.act_fn", "SiLUActivation"): (
                [of(at + "gate")], [of(at + "gate").sigmoid()]),
            module(f"{layer}.mlp.up_proj", "Linear"): ([of(at + "middle")], [of(at + "up")]),
            module(f"{layer}.mlp.down_proj", "Linear"): (
                [of(at + "gate").sigmoid() * of(at + "up")], [of(at + "down")]),
            module(f"{layer}.mlp", "MLP"): ([of(at + "middle")], [of(at + "down")]),
            module(layer, "DecoderLayer"): ([of(at + "in")], [of(at + "out")]),
        }  # fmt: skip
    return calls


def megatron(batch: Batch, call: int) -> dict[str, Any]:
    """Packed as Megatron has it: ids [1, tokens], activations [tokens, 1, hidden], heads grouped.

    Where samples begin is in no tensor.
    """
    parts = batch.activations()

    def of(name: str) -> Tensor:
        return torch.cat([p[name] for p in parts])[:, None]

    def module(path: str, cls: str) -> str:
        return f"Module.module.module.{path}.{cls}.forward.{call}"

    def heads(name: str, count: int) -> Tensor:
        x = of(name)
        return x.reshape(len(x), 1, count, SIZE)

    ids = torch.cat([torch.tensor(tokens) for tokens in batch.sequences])[None]
    looked_up = of("embed")[:, 0][None]
    calls: dict[str, Any] = {
        module("embedding.word_embeddings", "VocabParallelEmbedding"): ([ids], [looked_up]),
        module("embedding", "LanguageModelEmbedding"): ([ids, None], [of("embed")]),
    }
    for n in range(2):
        at, layer = f"{n}.", f"decoder.layers.{n}"
        q, k, v = heads(at + "q", HEADS), heads(at + "k", GROUPS), heads(at + "v", GROUPS)
        each = HEADS // GROUPS
        groups = [
            part
            for g in range(GROUPS)
            for part in (q[:, :, g * each : (g + 1) * each], k[:, :, g : g + 1], v[:, :, g : g + 1])
        ]
        qkv = torch.cat(groups, 2)
        fc1 = torch.cat([of(at + "gate"), of(at + "up")], -1)
        gated = of(at + "gate").sigmoid() * of(at + "up")
        calls |= {
            module(f"{layer}.input_layernorm", "WrappedTorchNorm"): (
                [of(at + "in")], [of(at + "norm")]),
            module(f"{layer}.self_attention.linear_qkv", "ColumnParallelLinear"): (
                [of(at + "norm")], [qkv.reshape(len(qkv), 1, -1)]),
            module(f"{layer}.self_attention.core_attention", "DotProductAttention"): (
                [q, k, v], [of(at + "q")]),
            module(f"{layer}.self_attention", "SelfAttention"): ([], [of(at + "o")]),
            module(f"{layer}.pre_mlp_layernorm", "WrappedTorchNorm"): (
                [of(at + "middle")], [of(at + "middle")]),
            module(f"{layer}.mlp.linear_fc1", "ColumnParallelLinear"): ([of(at + "middle")], [fc1]),
            module(f"{layer}.mlp.linear_fc2", "RowParallelLinear"): (
                [gated], [of(at + "down"), None]),
            module(f"{layer}.mlp", "MLP"): ([of(at + "middle")], [of(at + "down")]),
            module(layer, "TransformerLayer"): ([of(at + "in")], [of(at + "out")]),
        }  # fmt: skip
    return calls


def engine(
    batch: Batch, call: int, chunks: Sequence[tuple[int, int]] | None = None
) -> dict[str, Any]:
    """A prefill as SGLang and vLLM have it: tokens of all requests end to end, fused projections,
    the residual stream beside what a block adds to it.

    Args:
        chunks: which tokens of each prompt are in this pass (a prefix may be cached).
    """
    chunks = chunks or [(0, len(tokens)) for tokens in batch.sequences]
    parts = batch.activations()

    def of(*names: str) -> Tensor:
        return torch.cat(
            [
                torch.cat([p[name] for name in names], -1)[a:b]
                for p, (a, b) in zip(parts, chunks, strict=True)
            ]
        )

    def module(path: str, cls: str) -> str:
        return f"Module.model.{path}.{cls}.forward.{call}"

    ids = torch.cat(
        [torch.tensor(t)[a:b] for t, (a, b) in zip(batch.sequences, chunks, strict=True)]
    )
    positions = torch.cat([torch.arange(a, b) for a, b in chunks])
    calls: dict[str, Any] = {
        module("embed_tokens", "VocabParallelEmbedding"): ([ids], [of("embed")])
    }
    for n in range(2):
        at, layer = f"{n}.", f"layers.{n}"
        # the first block has no stream beside what it takes
        before = f"{n - 1}."
        taken = [of(before + "down"), of(before + "middle")] if n else [of(at + "in")]
        gated = of(at + "gate").sigmoid() * of(at + "up")
        calls |= {
            module(f"{layer}.input_layernorm", "RMSNorm"): (
                taken, [of(at + "norm"), of(at + "in")] if n else [of(at + "norm")]),
            module(f"{layer}.self_attn.qkv_proj", "QKVParallelLinear"): (
                [of(at + "norm")], [of(at + "q", at + "k", at + "v"), None]),
            module(f"{layer}.self_attn.rotary_emb", "RotaryEmbedding"): (
                [positions, of(at + "q"), of(at + "k")], [of(at + "q"), of(at + "k")]),
            module(f"{layer}.self_attn", "Qwen2Attention"): (
                [positions, of(at + "norm")], [of(at + "o")]),
            module(f"{layer}.post_attention_layernorm", "RMSNorm"): (
                [of(at + "o"), of(at + "in")], [of(at + "middle"), of(at + "middle")]),
            module(f"{layer}.mlp.gate_up_proj", "MergedColumnParallelLinear"): (
                [of(at + "middle")], [of(at + "gate", at + "up"), None]),
            module(f"{layer}.mlp.act_fn", "SiluAndMul"): (
                [of(at + "gate", at + "up")], [gated]),
            module(f"{layer}.mlp.down_proj", "RowParallelLinear"): (
                [gated], [of(at + "down"), None]),
            module(f"{layer}.mlp", "Qwen2MLP"): ([of(at + "middle")], [of(at + "down")]),
            module(layer, "Qwen2DecoderLayer"): (
                [positions, *taken], [of(at + "down"), of(at + "middle")]),
        }  # fmt: skip
    return calls


def divided(calls: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """An engine's pass as one of several tensor-parallel ranks has it, heads copied where they
    are too few; the weights of the divided layers with it."""
    g = torch.Generator().manual_seed(1)
    weights = torch.randn((HEADS + 2 * GROUPS) * SIZE, HIDDEN, generator=g)
    down = torch.randn(HIDDEN, INNER, generator=g)

    def heads(x: Tensor, count: int) -> Tensor:
        """This rank's of so many heads, along the last dimension."""
        each = max(1, count // size)
        first = rank * count // size if count >= size else rank // (size // count)
        return x[..., first * SIZE : (first + each) * SIZE]

    def qkv(x: Tensor) -> Tensor:
        q, k, v = x.split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE], -1)
        return torch.cat([heads(q, HEADS), heads(k, GROUPS), heads(v, GROUPS)], -1)

    found = dict(calls)
    for name, (inputs, outputs) in calls.items():
        if "qkv_proj" in name:
            found[name] = inputs, [qkv(outputs[0]), None], {"weight": qkv(weights.T).T.contiguous()}
        elif "gate_up_proj" in name:
            gate, up = (half.chunk(size, -1)[rank] for half in outputs[0].chunk(2, -1))
            down_proj = name.replace("gate_up_proj.MergedColumn", "down_proj.Row")
            own = (gate.sigmoid() * up).contiguous()
            found[name] = inputs, [torch.cat([gate, up], -1), None]
            found[down_proj] = [own], [], {"weight": down.chunk(size, -1)[rank].contiguous()}
    return found


def with_weights(calls: dict[str, Any]) -> dict[str, Any]:
    """A trainer's pass with the weights that :func:`divided` divides."""
    g = torch.Generator().manual_seed(1)
    weights = torch.randn((HEADS + 2 * GROUPS) * SIZE, HIDDEN, generator=g)
    down = torch.randn(HIDDEN, INNER, generator=g)
    kinds = dict(
        zip("qkv", weights.split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE]), strict=True)
    )
    found = dict(calls)
    for name, (inputs, outputs) in calls.items():
        for kind, weight in kinds.items():
            if f"{kind}_proj" in name and "self_attn" in name:
                found[name] = inputs, outputs, {"weight": weight.contiguous()}
        if "up_proj" in name:
            gate = calls[name.replace("up_proj", "gate_proj")][1][0]
            inner = gate.sigmoid() * outputs[0]
            found[name.replace("up_proj", "down_proj")] = [inner], [], {"weight": down}
    return found


def save(directory: Path, *calls: dict[str, Any]) -> Path:
    """A rank directory holding some passes."""
    return write(directory, {name: slots for part in calls for name, slots in part.items()})
