"""Which part of the Hugging Face model's tensors a Megatron process computes.

Tensor parallelism divides the features of what a column-parallel layer gives and a row-parallel
layer takes; everything else is whole on each of its ranks. Of two projections in one
(:mod:`rlprobe.logical.fused`) each has records of its own here. A norm that is fused into the
projection behind it (Transformer Engine) takes what the projection takes.

Sequences that are divided (sequence and context parallelism) are rows, not features:
:attr:`MegatronPlaces.shards` tells which a process has. Experts are divided by tensor-parallel
groups of their own, which may be others than those of attention; what a container of experts takes
and gives is recorded where its rows are still in the tokens' order
(:mod:`rlprobe.capture.megatron_dispatch`). Modules of kinds that are not known here have no places:
nothing is said of them then.

Works on the modules alone (megatron-core from 0.9 on); nothing of Megatron is imported.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlprobe.capture.light.coordinates import SequenceShards
from rlprobe.capture.light.pieces import Piece, is_rotary
from rlprobe.capture.megatron_layout import expert_tensor, layout
from rlprobe.capture.megatron_names import is_megatron
from rlprobe.logical import fused

#: Whole on every tensor-parallel rank: by the last part of the Hugging Face path.
_WHOLE = re.compile(
    r"(^|\.)(layers\.\d+|self_attn|mlp|embed_tokens|embedding|decoder|gate|norm|input_layernorm|"
    r"post_attention_layernorm|rotary_emb)$"
)
#: Modules that stand where another model has one, and do nothing.
_IDENTITY = re.compile(r"^Identity(Func)?Op$")
#: Divided by heads: norms of queries and keys, and what attention does between its projections,
#: which takes queries first and gives as many heads.
_HEADS = re.compile(r"\.(q_norm|k_norm|core_attention)$")
_EXPERT = re.compile(r"\.experts\.\d+(\.|$)")
#: Names of modules as Megatron and Transformer Engine call them.
_COLUMN, _ROW = "ColumnParallelLinear", "RowParallelLinear"
_FUSED_NORM = "LayerNormColumnParallelLinear"


class MegatronPlaces:
    """Places of the tensors of Megatron's models.

    Args:
        chunks: the models without their wrappers.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        config: Any = getattr(chunks[0], "config", None)
        found = layout(list(chunks))
        self._size = int(found.get("tp", 1))
        self._rank = int(found.get("tp_rank", 0))
        divided = bool(found.get("sequence_parallel", False))
        #: How this process shares the tokens of a sequence.
        self.shards = SequenceShards(
            int(found.get("cp", 1)),
            int(found.get("cp_rank", 0)),
            self._size if divided else 1,
            self._rank if divided else 0,
        )
        self._expert_size, self._expert_rank = expert_tensor()
        self._compute: torch.dtype = getattr(config, "params_dtype", torch.float32)
        self._gated = bool(getattr(config, "gated_linear_unit", False))
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        groups = int(getattr(config, "num_query_groups", 0) or heads)
        self._queries = heads // groups if groups and heads % groups == 0 else 0
        self._groups = groups

    @classmethod
    def of(cls, chunks: Sequence[nn.Module]) -> MegatronPlaces | None:
        """Places for Megatron's models; None where the models are not Megatron's."""
        return cls(chunks) if chunks and all(is_megatron(chunk) for chunk in chunks) else None

    def pieces(
        self, path: str, module: nn.Module, direction: str, slot: str, width: int
    ) -> Sequence[Piece]:
        """See :class:`rlprobe.capture.light.pieces.Places`."""
        if _IDENTITY.search(type(module).__name__) or path.endswith(".experts"):
            return ()
        if _EXPERT.search(path):
            return self._expert(path, module, direction, slot, width)
        if is_rotary(path) and self.angles(path, module) is None:
            return ()
        kind = _kind(module)
        if kind == _COLUMN:
            return self._column(path, module, direction, slot, width)
        if kind == _ROW:
            return self._row(path, module, slot, width)
        if _HEADS.search(path):
            # of fewer groups than ranks, several ranks have the same keys, and each its own part of
            # their gradient
            shared = path.endswith(".k_norm") and self._groups < self._size
            return () if shared else (self._shard(path, width),)
        if self._size > 1 and not _WHOLE.search(path):
            return ()
        return (Piece(path, 0, width),)

    def angles(self, path: str, module: nn.Module) -> torch.dtype | None:
        """See :class:`rlprobe.capture.light.pieces.Places`."""
        # others scale cosines by a factor that they hand out, or do not (YaRN)
        if not is_rotary(path) or type(module).__name__ != "RotaryEmbedding":
            return None
        return self._compute

    def _expert(
        self, path: str, module: nn.Module, direction: str, slot: str, width: int
    ) -> Sequence[Piece]:
        """Of one expert: as any projection, but divided over ranks of its own."""
        if self._expert_size != self._size or self._expert_rank != self._rank:
            own = copy.copy(self)
            own._size, own._rank = self._expert_size, self._expert_rank
            return own.pieces(path, module, direction, slot, width)
        kind = _kind(module)
        if kind == _COLUMN:
            return self._column(path, module, direction, slot, width)
        if kind == _ROW and slot == "input":
            return self._row(path, module, slot, width)
        # what ranks of one expert give is added up later, where tokens are back in their order
        return (Piece(path, 0, width),) if self._size == 1 or slot == "input" else ()

    def _column(
        self, path: str, module: Any, direction: str, slot: str, width: int
    ) -> Sequence[Piece]:
        stem, _, name = path.rpartition(".")
        parts = fused.PARTS.get(name, ()) if self._gated or name != fused.GATE_UP else ()
        if slot == "input":
            return self._taken(path, stem, parts, module, direction, width)
        if not parts:
            whole = self._size == 1 or getattr(module, "gather_output", False)
            return (Piece(path, 0, width) if whole else self._shard(path, width),)
        return [
            Piece(f"{stem}.{part}", own.first, own.whole, tuple(own.rows))
            for part, own in zip(parts, self._split(name, width), strict=False)
            if own.rows
        ]

    def _taken(
        self,
        path: str,
        stem: str,
        parts: Sequence[str],
        module: Any,
        direction: str,
        width: int,
    ) -> Sequence[Piece]:
        if _is_norm_fused(module):
            norm = fused.NORMS.get(path.rpartition(".")[2])
            layer = stem.rpartition(".")[0]
            return () if norm is None else (Piece(f"{layer}.{norm}", 0, width),)
        if not parts:
            return (Piece(path, 0, width),)
        if direction == "backward":  # the sum of what the parts send back
            return (Piece(path, 0, width),)
        return [Piece(f"{stem}.{part}", 0, width) for part in parts]

    def _row(self, path: str, module: Any, slot: str, width: int) -> Sequence[Piece]:
        if slot == "input":
            whole = self._size == 1 or not getattr(module, "input_is_parallel", True)
            return (Piece(path, 0, width) if whole else self._shard(path, width),)
        # its bias, if there is one, is added by whoever called it
        if getattr(module, "skip_bias_add", False) and getattr(module, "bias", None) is not None:
            return ()
        return (Piece(path, 0, width),)

    def _split(self, name: str, width: int) -> Sequence[fused.Own]:
        if name == fused.GATE_UP:
            return fused.halves_of_rank(width, self._size, self._rank)
        each, rest = divmod(width * self._size, self._groups * (self._queries + 2) or 1)
        if rest or not self._groups or not self._queries:
            return ()
        return fused.qkv_of_rank(self._groups, self._queries, each, self._size, self._rank)

    def _shard(self, path: str, width: int, features: tuple[int, ...] | None = None) -> Piece:
        return Piece(path, self._rank * width, self._size * width, features)


def _kind(module: nn.Module) -> str:
    for base in type(module).__mro__:
        for kind in (_COLUMN, _ROW):
            if base.__name__.endswith(kind):
                return kind
    return ""


def _is_norm_fused(module: nn.Module) -> bool:
    return any(base.__name__.endswith(_FUSED_NORM) for base in type(module).__mro__)
