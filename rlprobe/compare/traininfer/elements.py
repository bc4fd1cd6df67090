"""Elementwise figures of matched records over the same tokens of both models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlprobe.compare import measures
from rlprobe.compare.tensors import elementwise
from rlprobe.compare.tensors.distance import distance
from rlprobe.compare.traininfer import layout, shards
from rlprobe.compare.traininfer.fused import Described, Key
from rlprobe.compare.traininfer.passes import Pass
from rlprobe.compare.traininfer.tokens import Matched, Span
from rlprobe.dumps.apinames import SEPARATOR
from rlprobe.dumps.tensors.dtypes import DTYPES, Array, numbers
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError
from rlprobe.logical import fused

_MEGATRON_QKV = re.compile(r"(^|\.)self_attention\.linear_qkv$")
_NOT_COMPARED = "not the same tokens: "


@dataclass(frozen=True)
class Names:
    """The records of a pass: tensor file and shape by key, and the key of each name."""

    files: Mapping[Key, tuple[str, tuple[int, ...]]]
    keys: Mapping[str, Key]

    @classmethod
    def of(cls, p: Pass) -> Names:
        columns = ("module", "slot", "index", "name", "data_name", "shape")
        rows = list(p.records.select(columns).iter_rows())
        return cls(
            {
                (module, slot, index): (file, tuple(shape or ()))
                for module, slot, index, _, file, shape in rows
                if file is not None
            },
            {name: (module, slot, index) for module, slot, index, name, _, _ in rows},
        )


class Tokens:
    """The tokens of one engine pass, and where the training passes have them."""

    def __init__(
        self,
        inference: Pass,
        training: Sequence[Pass],
        matched: Sequence[Matched],
        ranks: int,
        halves: frozenset[str],
        described: Described,
    ) -> None:
        """
        Args:
            inference, training: the passes.
            matched: which tokens of them are the same.
            ranks: tensor-parallel ranks of the engine.
            halves: modules of two equal parts, each of which is divided by itself.
            described: what the engine's operators take and give.
        """
        self._inference = inference
        self._ranks = ranks
        self._halves = halves
        self._training = training
        # in the order of the training passes, so that each tensor is opened once
        self._matched = sorted(matched, key=lambda m: m.training)
        self._names: dict[int, Names] = {}
        own = Names.of(inference)
        self._own = replace(own, keys={**own.keys, **described.renamed})
        self._addends = described.addends
        first = self._matched[0].training
        self._first = self._names[first] = Names.of(training[first])

    @property
    def count(self) -> int:
        return sum(len(m.span) for m in self._matched)

    def figures(self, benchmark: str, target: str) -> dict[str, Any]:
        """Columns of :mod:`rlprobe.compare.tensors.elementwise` for one matched record.

        Args:
            benchmark: its name in the engine's pass; several names are joined parts.
            target: its name in the first training pass, likewise.
        """
        try:
            one = self._of_engine([self._own.keys[n] for n in benchmark.split(SEPARATOR)])
            other, parts = self._of_training([self._first.keys[n] for n in target.split(SEPARATOR)])
            if one.shape != other.shape:
                other = self._piece(other, parts, one.shape[1], benchmark)
        except ValueError as error:
            unreadable = isinstance(error, TensorFileError)
            return elementwise.unmeasured(
                measures.UNREADABLE if unreadable else measures.SHAPE,
                str(error) if unreadable else f"{_NOT_COMPARED}{error}",
            )
        return elementwise.described(distance(one, other))

    def _of_engine(self, keys: Sequence[Key]) -> TensorFile:
        p = self._inference
        spans = [m.inference for m in self._matched]
        tensor = _whole([self._rows(p, self._own, key, spans, False) for key in keys], keys)
        stream = self._addends.get(keys[0])
        if stream is None:
            return tensor
        return _sum(tensor, self._rows(p, self._own, stream, spans, False))

    def _piece(
        self, whole: TensorFile, parts: Sequence[int], width: int, benchmark: str
    ) -> TensorFile:
        """What this rank of the engine has of training's values."""
        if self._ranks == 1:
            raise ValueError(
                f"a token has {width} values in the engine and {whole.shape[1]} in training"
            )
        rank = self._inference.process.rank % self._ranks
        parts = shards.divided(parts, benchmark.split(SEPARATOR)[0], self._halves)
        return layout.as_tensor(whole, shards.piece(whole.view(), parts, width, rank, self._ranks))

    def _of_training(self, keys: Sequence[Key]) -> tuple[TensorFile, list[int]]:
        """The values of all tokens, and the widths of the parts they lie in."""
        pieces: list[TensorFile] = []
        widths: list[int] = []
        for number in dict.fromkeys(m.training for m in self._matched):
            p = self._training[number]
            names = self._names.setdefault(number, Names.of(p))
            spans = [m.span for m in self._matched if m.training == number]
            parts = [
                part
                for key in keys
                for part in _by_kind(
                    self._rows(p, names, key, spans, "decoder.layers" in key[0]), names, key
                )
            ]
            pieces.append(_whole(parts, keys))
            widths = [int(part.shape[1]) for part in parts]
        if len({piece.dtype for piece in pieces}) > 1 or len({p.shape[1] for p in pieces}) > 1:
            raise ValueError("the training passes differ in type or width")
        raw = np.concatenate([piece.view() for piece in pieces])
        return layout.as_tensor(pieces[0], raw), widths if sum(widths) == raw.shape[1] else [
            raw.shape[1]
        ]

    @staticmethod
    def _rows(p: Pass, names: Names, key: Key, spans: Sequence[Span], first: bool) -> TensorFile:
        found = names.files.get(key)
        if found is None:
            raise TensorFileError(f"{'.'.join(key)} was not dumped in this pass")
        name, shape = found
        tensor = p.tensors.open(name, shape)
        return layout.as_tensor(tensor, layout.rows(tensor, p.grid, spans, first))


def _whole(parts: Sequence[TensorFile], keys: Sequence[Key]) -> TensorFile:
    """Parts behind one another; inputs of joined modules are one and the same."""
    if len(parts) == 1 or keys[0][1] == "input":
        return parts[0]
    if len({part.dtype for part in parts}) > 1:
        raise ValueError("its parts are of different types")
    return layout.as_tensor(parts[0], np.concatenate([part.view() for part in parts], axis=1))


def _sum(one: TensorFile, other: TensorFile) -> TensorFile:
    """The sum of two tensors in float32, as the next module gets it; float64 where they are."""
    wide = not (one.dtype.narrow and other.dtype.narrow)
    values: Array = numbers(one.elements, one.dtype, wide) + numbers(  # type: ignore[operator]
        other.elements, other.dtype, wide
    )
    dtype = DTYPES["float64" if wide else "float32"]
    return replace(one, dtype=dtype, elements=values)


def _by_kind(tensor: TensorFile, names: Names, key: Key) -> list[TensorFile]:
    """Megatron's query, key and value, which lie group by group; any other tensor as it is.

    Heads, groups and their size are read off the inputs of the layer's attention.
    """
    module, slot, _ = key
    if slot != "output" or not _MEGATRON_QKV.search(module):
        return [tensor]
    attention = module.removesuffix("linear_qkv") + "core_attention"
    shapes = [names.files.get((attention, "input", index)) for index in ("0", "1")]
    if shapes[0] is None or shapes[1] is None:
        raise ValueError("heads lie group by group, and nothing says how many there are")
    (heads, size), groups = shapes[0][1][-2:], shapes[1][1][-2]
    width = tensor.shape[1]
    if groups == 0 or heads % groups or width != (heads + 2 * groups) * size:
        raise ValueError(f"{heads} heads in {groups} groups of {size} do not make {width} values")
    kinds = fused.by_group(groups, heads // groups, size)
    return [
        layout.as_tensor(tensor, np.ascontiguousarray(tensor.view()[:, features]))
        for features in kinds
    ]
