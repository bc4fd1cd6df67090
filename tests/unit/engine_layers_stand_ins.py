"""Layers that are divided and fused as vLLM's, without vLLM, and the training model they serve."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

WIDTH, HEAD, HEADS, INNER, EXPERTS, VOCABULARY, PADDED = 16, 4, 4, 12, 4, 21, 32
Weights = Mapping[str, Tensor]


def trained(seed: int = 0, kv_heads: int = 2) -> dict[str, Tensor]:
    """Weights by training's names."""
    draw = torch.Generator().manual_seed(seed)
    attention, mlp, moe = (f"model.layers.0.{part}" for part in ("self_attn", "mlp", "moe"))
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        f"{attention}.q_proj.weight": (HEADS * HEAD, WIDTH),
        f"{attention}.q_proj.bias": (HEADS * HEAD,),
        f"{attention}.k_proj.weight": (kv_heads * HEAD, WIDTH),
        f"{attention}.k_proj.bias": (kv_heads * HEAD,),
        f"{attention}.v_proj.weight": (kv_heads * HEAD, WIDTH),
        f"{attention}.v_proj.bias": (kv_heads * HEAD,),
        f"{attention}.o_proj.weight": (WIDTH, HEADS * HEAD),
        f"{mlp}.gate_proj.weight": (INNER, WIDTH),
        f"{mlp}.up_proj.weight": (INNER, WIDTH),
        f"{mlp}.down_proj.weight": (WIDTH, INNER),
        f"{moe}.experts.gate_up_proj": (EXPERTS, 2 * INNER, WIDTH),
        f"{moe}.experts.down_proj": (EXPERTS, WIDTH, INNER),
        "model.norm.weight": (WIDTH,),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


class QKVParallelLinear(nn.Module):
    pass


class MergedColumnParallelLinear(nn.Module):
    pass


class RowParallelLinear(nn.Module):
    pass


class VocabParallelEmbedding(nn.Module):
    pass


class RoutedExperts(nn.Module):
    pass


class RMSNorm(nn.Module):
    pass


def _layer(cls: Callable[[], nn.Module], tensors: Weights, **said: object) -> nn.Module:
    module = cls()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
    for name, value in said.items():
        setattr(module, name, value)
    return module


def engine(
    weights: Weights, rank: int = 0, size: int = 1, *, by_expert: bool = False, pad: int = 0
) -> nn.Module:
    """What one tensor-parallel rank of an engine holds of a model.

    Args:
        weights: :func:`trained`'s.
        rank, size: of the tensor-parallel group.
        by_expert: experts are dealt out whole.
        pad: rows that the engine adds to an expert's gate and to its up projection.
    """
    attention, mlp, moe = (f"model.layers.0.{part}" for part in ("self_attn", "mlp", "moe"))
    kv_heads = weights[f"{attention}.k_proj.weight"].shape[0] // HEAD

    def piece(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(size, dim)[rank]

    def heads(tensor: Tensor) -> Tensor:
        return piece(tensor, 0) if kv_heads >= size else tensor.chunk(kv_heads)[
            rank // (size // kv_heads)
        ]  # fmt: skip

    qkv = {
        leaf: torch.cat(
            [piece(weights[f"{attention}.q_proj.{leaf}"], 0),
             heads(weights[f"{attention}.k_proj.{leaf}"]),
             heads(weights[f"{attention}.v_proj.{leaf}"])]
        )
        for leaf in ("weight", "bias")
    }  # fmt: skip
    gate_up = torch.cat(
        [piece(weights[f"{mlp}.{name}.weight"], 0) for name in ("gate_proj", "up_proj")]
    )
    vocabulary = torch.zeros(PADDED, WIDTH, dtype=gate_up.dtype)
    vocabulary[:VOCABULARY] = weights["model.embed_tokens.weight"]
    both, down = weights[f"{moe}.experts.gate_up_proj"], weights[f"{moe}.experts.down_proj"]
    placed = None
    if by_expert:
        both, down = piece(both, 0), piece(down, 0)
        placed = torch.full((EXPERTS,), -1)
        placed.chunk(size)[rank].copy_(torch.arange(EXPERTS // size))
        inner = 1, 0
    else:
        both = torch.cat([piece(part, 1) for part in both.chunk(2, 1)], 1)
        down, inner = piece(down, 2), (size, rank)
    width = both.shape[1] // 2
    if pad:
        zeros = torch.zeros(both.shape[0], pad, WIDTH, dtype=both.dtype)
        both = torch.cat([torch.cat([part, zeros], 1) for part in both.chunk(2, 1)], 1)
        down = torch.cat([down, torch.zeros(*down.shape[:2], pad, dtype=down.dtype)], 2)
    config = types.SimpleNamespace(
        tp_size=inner[0], tp_rank=inner[1], intermediate_size_per_partition_unpadded=width
    )
    place = {"tp_rank": rank, "tp_size": size}
    layer = nn.ModuleDict(
        {
            "self_attn": nn.ModuleDict(
                {
                    "qkv_proj": _layer(
                        QKVParallelLinear, qkv, head_size=HEAD, total_num_heads=HEADS,
                        total_num_kv_heads=kv_heads, **place,
                    ),
                    "o_proj": _layer(
                        RowParallelLinear,
                        {"weight": piece(weights[f"{attention}.o_proj.weight"], 1)}, **place,
                    ),
                }
            ),
            "mlp": nn.ModuleDict(
                {
                    "gate_up_proj": _layer(
                        MergedColumnParallelLinear, {"weight": gate_up},
                        output_sizes=[INNER, INNER], **place,
                    ),
                    "down_proj": _layer(
                        RowParallelLinear,
                        {"weight": piece(weights[f"{mlp}.down_proj.weight"], 1)}, **place,
                    ),
                }
            ),
            "moe": nn.ModuleDict(
                {
                    "experts": nn.ModuleDict(
                        {
                            "routed_experts": _layer(
                                RoutedExperts, {"w13_weight": both, "w2_weight": down},
                                moe_config=config, global_num_experts=EXPERTS,
                                _expert_map=placed,
                            )
                        }
                    )
                }
            ),
        }
    )  # fmt: skip
    model = nn.ModuleDict(
        {
            "embed_tokens": _layer(
                VocabParallelEmbedding, {"weight": piece(vocabulary, 0)},
                org_vocab_size=VOCABULARY, **place,
            ),
            "layers": nn.ModuleList([layer]),
            "norm": _layer(RMSNorm, {"weight": weights["model.norm.weight"]}),
        }
    )  # fmt: skip
    return nn.ModuleDict({"model": model})


class WithLoRA(nn.Module):
    """A layer that may have adapters, as vLLM wraps it."""


def adapters(seed: int = 0, rank: int = 3, kv_heads: int = 2) -> dict[str, Tensor]:
    """Adapters of every projection of :func:`trained`, by training's names."""
    draw = torch.Generator().manual_seed(100 + seed)
    found = {}
    for name, weight in trained(0, kv_heads).items():
        if name.endswith("_proj.weight"):
            outputs, inputs = weight.shape
            layer = name.removesuffix(".weight")
            found[f"{layer}.lora_A.default.weight"] = torch.randn(rank, inputs, generator=draw)
            found[f"{layer}.lora_B.default.weight"] = torch.randn(outputs, rank, generator=draw)
    return found


def with_adapters(
    model: nn.Module, given: Weights, rank: int = 0, size: int = 1, *,
    alpha: float = 6.0, slots: int = 1, most: int = 8,
) -> nn.Module:  # fmt: skip
    """An engine's model whose layers have adapters apart, in the last of some slots.

    Args:
        model: :func:`engine`'s.
        given: :func:`adapters`'.
        rank, size: of the tensor-parallel group.
        alpha: the adapters' factor, over their rank.
        slots: of adapters in all.
        most: the largest rank that an adapter may have.
    """
    loras = {}
    for path, names in (
        ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")), ("self_attn.o_proj", ("o_proj",)),
        ("mlp.gate_up_proj", ("gate_proj", "up_proj")), ("mlp.down_proj", ("down_proj",)),
    ):  # fmt: skip
        path = f"model.layers.0.{path}"
        above, _, leaf = path.rpartition(".")
        base = model.get_submodule(path)
        stacks, ids = [], []
        for name in names:
            a, b = (given[f"{above}.{name}.lora_{x}.default.weight"] for x in ("A", "B"))
            pieces, place = size, rank
            if name in ("k_proj", "v_proj"):
                pieces = min(size, b.shape[0] // HEAD)
                place = rank // (size // pieces)
            if leaf in ("o_proj", "down_proj"):
                a = a.chunk(size, 1)[rank]
            else:
                b = b.chunk(pieces, 0)[place]
            stack = [torch.zeros(slots, 1, most, a.shape[1]), torch.zeros(slots, 1, len(b), most)]
            stack[0][-1, 0, : len(a)] = a
            stack[1][-1, 0, :, : b.shape[1]] = b * (alpha / len(a))
            stacks.append(stack)
            ids.append(place)
        layer = WithLoRA()
        layer.base_layer = base
        layer.lora_a_stacked, layer.lora_b_stacked = (
            tuple(stack[n] for stack in stacks) for n in (0, 1)
        )
        if len(names) > 1:
            layer.output_ids = tuple(ids)
        model.get_submodule(above)._modules[leaf] = layer
        kept = {"lora_alphas": [alpha] * len(names)} if len(names) > 1 else {"lora_alpha": alpha}
        loras[path] = types.SimpleNamespace(rank=len(given[next(iter(given))]), **kept)
    model.lora_manager = types.SimpleNamespace(  # type: ignore[assignment]
        lora_index_to_id=[None] * (slots - 1) + [123],
        _registered_adapters={123: types.SimpleNamespace(loras=loras)},
    )
    return model


def trainer(weights: Weights) -> nn.Module:
    """A model whose parameters have training's names."""
    root = nn.Module()
    for name, tensor in weights.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(tensor.clone(), requires_grad=False))
    return root
