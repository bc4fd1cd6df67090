"""Parameters of an inference engine's layers as those of the Hugging Face model.

vLLM and SGLang fuse projections (one behind the other), pad the vocabulary, keep all experts of a
block in two tensors, and divide each among tensor-parallel ranks. Here every parameter is what
training calls it, and where in it the rank's numbers lie, so that the engine's weights can be held
against the trainer's by name, by digest and by sketch. Layers are known by the names of their
classes and what these say of themselves; no engine is imported.

What is quantised or packed in a layout of the engine's own keeps the engine's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from rlprobe.capture.megatron_names import is_megatron
from rlprobe.capture.names import parameter_name, unwrap
from rlprobe.capture.parameters import Held
from rlprobe.logical import fused

QKV, MERGED = "QKVParallelLinear", "MergedColumnParallelLinear"
COLUMN, ROW, REPLICATED = "ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear"
VOCABULARY = "VocabParallelEmbedding"
#: Of the experts of a block: gate and up of each one behind the other, and down.
EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
#: Between the block's experts and their tensors, in newer vLLM.
_ROUTED = ".routed_experts"
#: Classes of layers that only an engine has.
_ENGINE = frozenset({QKV, MERGED, COLUMN, ROW, VOCABULARY})
_FLOATS = 16


class EngineParameters:
    """How the parameters of an engine's model are divided; nothing is in any other model.

    Args:
        models: the model, or its parts.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._owners: dict[int, tuple[str, nn.Module, str]] = {}
        roots = [unwrap(model) for model in models]
        if any(is_megatron(root) for _, root in roots):
            return  # its classes have names of an engine's (VocabParallelEmbedding)
        if not any(_kinds(module) & _ENGINE for _, root in roots for module in root.modules()):
            return
        for _, root in roots:
            for path, module in root.named_modules():
                for leaf, parameter in module.named_parameters(recurse=False):
                    self._owners.setdefault(id(parameter), (path, module, leaf))

    def apart(self, item: Held, tensor: Tensor) -> Iterator[tuple[Held, Tensor]]:
        """A parameter's parts under training's names, or itself where it is none of those.

        Args:
            item: the parameter, as the engine has it.
            tensor: its values.
        """
        owner = self._owners.get(id(item.parameter))
        parts = None if owner is None else list(_parts(item, tensor, *owner))
        yield from parts or [(item, tensor)]


def _kinds(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _parts(
    item: Held, tensor: Tensor, path: str, module: nn.Module, leaf: str
) -> Iterator[tuple[Held, Tensor]]:
    kinds, name = _kinds(module), parameter_name(path)
    rank, size = _place(module)
    if tensor.element_size() * 8 < _FLOATS or not tensor.is_floating_point():
        return  # quantised
    if leaf in EXPERTS and tensor.dim() == 3:
        yield from _experts(item, tensor, path, module, leaf)
    elif leaf not in ("weight", "bias"):
        return
    elif QKV in kinds:
        yield from _projections(item, tensor, name, fused.PARTS[fused.QKV], leaf,
                                _qkv_rows(module, tensor.shape[0], rank, size))  # fmt: skip
    elif MERGED in kinds:
        widths = [int(width) // size for width in getattr(module, "output_sizes", ())]
        names = fused.PARTS.get(name.rpartition(".")[2], ())
        rows = [(width, rank * width, size * width) for width in widths]
        if len(names) == len(rows) and sum(widths) == tensor.shape[0]:
            yield from _projections(item, tensor, name, names, leaf, rows)
    elif VOCABULARY in kinds:
        yield from _vocabulary(item, tensor, module, rank)
    elif ROW in kinds and leaf == "weight":
        yield _cut(item, tensor, 1, rank, size)
    elif COLUMN in kinds and ROW not in kinds:
        yield _cut(item, tensor, 0, rank, size)


def _place(module: nn.Module) -> tuple[int, int]:
    """The tensor-parallel rank that a layer is divided for, and of how many."""
    config: Any = getattr(module, "moe_config", None) or module
    size = getattr(config, "tp_size", getattr(config, "moe_tp_size", 1))
    rank = getattr(config, "tp_rank", getattr(config, "moe_tp_rank", 0))
    return int(rank), int(size)


def _qkv_rows(module: Any, count: int, rank: int, size: int) -> list[tuple[int, int, int]]:
    """Of each of the three: rows held, the first of them in the whole, rows of the whole."""
    head = int(getattr(module, "head_size", 0))
    value = int(getattr(module, "v_head_size", head))
    heads = [int(getattr(module, f"total_num_{kind}heads", 0)) for kind in ("", "kv_")]
    if not head or not all(heads):
        return []
    own = max(1, heads[1] // size)
    first = rank // max(1, size // heads[1]) * own
    rows = [
        (heads[0] // size * head, rank * (heads[0] // size) * head, heads[0] * head),
        (own * head, first * head, heads[1] * head),
        (own * value, first * value, heads[1] * value),
    ]
    return rows if sum(held for held, _, _ in rows) == count else []


def _projections(
    item: Held, tensor: Tensor, path: str, names: Sequence[str], leaf: str,
    rows: Sequence[tuple[int, int, int]],
) -> Iterator[tuple[Held, Tensor]]:  # fmt: skip
    above, at = path.rpartition(".")[0], 0
    for name, (held, first, whole) in zip(names, rows, strict=False):
        own = tensor.narrow(0, at, held)
        at += held
        shape = (whole, *tensor.shape[1:])
        cut = (0, first) if held < whole else None
        yield (
            Held(f"{above}.{name}.{leaf}", item.parameter, own, shape, cut, None, held == whole),
            own,
        )


def _vocabulary(
    item: Held, tensor: Tensor, module: Any, rank: int
) -> Iterator[tuple[Held, Tensor]]:
    """The rows that stand for a token of the model's vocabulary."""
    whole = int(getattr(module, "org_vocab_size", tensor.shape[0]))
    first = rank * tensor.shape[0]
    own = tensor[: max(0, min(tensor.shape[0], whole - first))]
    complete = len(own) == whole
    shape = (whole, *tensor.shape[1:])
    held = Held(item.name, item.parameter, own, shape, None if complete else (0, first), None,
                complete)  # fmt: skip
    yield held, own


def _cut(item: Held, tensor: Tensor, dimension: int, rank: int, size: int) -> tuple[Held, Tensor]:
    if size == 1:
        return item, tensor
    shape = list(tensor.shape)
    first = rank * shape[dimension]
    shape[dimension] *= size
    cut = (dimension, first)
    return dataclasses.replace(item, shape=tuple(shape), cut=cut, complete=False), tensor


def _experts(
    item: Held, tensor: Tensor, path: str, module: Any, leaf: str
) -> Iterator[tuple[Held, Tensor]]:
    """All experts of a block, ``[experts, rows, columns]``, those of a rank or a slice of each."""
    rank, size = _place(module)
    local = tensor.shape[0]
    total = int(getattr(module, "global_num_experts", getattr(module, "num_experts", local)))
    ids = _ids(module, local, total)
    if ids is None:
        return
    name = f"{parameter_name(path).removesuffix(_ROUTED)}.{EXPERTS[leaf]}"
    _, rows, columns = tensor.shape
    width = getattr(getattr(module, "moe_config", None), "intermediate_size_per_partition_unpadded",
                    None)  # fmt: skip
    if leaf == "w2_weight":
        own = tensor if width is None else tensor[..., :width]
        inner = [(rank * own.shape[2], own.shape[2])]
        shape = (total, rows, size * own.shape[2])
        lines = [row * shape[2] + first for row in range(rows) for first, _ in inner]
        runs = [(line, own.shape[2]) for line in lines]
    else:
        half = rows // 2 if width is None else int(width)
        own = tensor if half == rows // 2 else _halves(tensor, half)
        shape = (total, 2 * half * size, columns)
        runs = [((part * size + rank) * half * columns, half * columns) for part in (0, 1)]
    each = shape[1] * shape[2]
    if size == 1 and local == total and ids == list(range(total)):
        yield Held(name, item.parameter, own, shape), own
        return
    stretches = [(expert * each + first, count) for expert in ids for first, count in runs]
    yield (
        Held(name, item.parameter, own, shape, complete=False, stretches=_merged(stretches)),
        own,
    )


def _halves(tensor: Tensor, half: int) -> Tensor:
    """Gate and up without the rows that pad each of them."""
    padded = tensor.shape[1] // 2
    return tensor.view(tensor.shape[0], 2, padded, -1)[:, :, :half].flatten(1, 2)


def _ids(module: Any, local: int, total: int) -> list[int] | None:
    """Which experts of the model the rank has, in the order of its tensors; None: not known."""
    if local == total:
        return list(range(total))
    placed = getattr(module, "_expert_map", None)
    if isinstance(placed, Tensor) and len(placed) == total:
        where = placed.tolist()
        held = sorted((place, expert) for expert, place in enumerate(where) if place >= 0)
        return [expert for _, expert in held] if len(held) == local else None
    return None


def _merged(stretches: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Stretches that follow one another as one."""
    found: list[tuple[int, int]] = []
    for first, count in stretches:
        if found and first == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((first, count))
    return tuple(found)
