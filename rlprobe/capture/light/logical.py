"""One record per module of what it takes and gives over a whole stage, in whatever layout.

``{side}/logical/{stage}-step{N}-rank{R}.npz`` (numpy arrays, no pickles) has a row per module,
direction and slot that this process computed a part of, over all its micro-batches:

- ``module``, ``op``, ``direction`` (forward, backward), ``slot`` (input, output, as in the record
  tables: backward, input is the gradient at the module's output), ``dtype``; ``sequence``: the
  order in which the calls were first complete;
- ``sketch``: fp64, shape (rows, 8, 61), see :mod:`rlprobe.coordinates`; of a width that is no
  multiple of 8 the first of the eight has all;
- ``squares``, ``sum``, ``max``, ``min`` of the elements that are tokens' (padding has no part),
  ``count`` of them, ``tokens`` and ``calls``;
- ``first``, ``features``, ``width``: which features of the logical tensor the process has;
- ``identity``: two numbers of 32 bits that say which tokens they were.

Besides: ``skipped``, the calls of the model whose tokens nothing told.

Only the first tensor of floating point numbers that has a row for each token counts, of what a
module takes and of what it gives: hidden states, not masks or tables of angles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlprobe.capture.engine import StageContext
from rlprobe.capture.light.coordinates import Batch, Tokens
from rlprobe.capture.light.pieces import Piece, Places
from rlprobe.capture.light.routers import Choice
from rlprobe.capture.light.sketches import has_fp64
from rlprobe.capture.light.statistics import Numbers, Statistics, has_values
from rlprobe.coordinates import GROUPS
from rlprobe.files import written
from rlprobe.sketch import K

#: (module, op, direction, slot) of the Hugging Face model.
_Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Taken:
    """The tensor of a call that is recorded, and its tokens' rows."""

    tensor: Tensor
    rows: Tensor
    batch: Batch
    #: Whether the rows are the tensor's own, and not made from it.
    own: bool = True


class _Record:
    """What has been added up of one record."""

    def __init__(self, piece: Piece, features: int, dtype: torch.dtype) -> None:
        self.piece = piece
        self.features = features
        self.dtype = str(dtype)
        self.sketch: Tensor | None = None
        #: Squares and sum; largest value and the largest of the negated: on the device, and read.
        self.sums: Tensor | None = None
        self.ends: Tensor | None = None
        self.numbers = [0.0, 0.0, -math.inf, -math.inf]
        self.count = self.tokens = self.calls = 0
        self.identity = 0

    def add(self, batch: Batch, sketch: Tensor, count: int) -> None:
        """Add a call."""
        if self.sketch is None:
            self.sketch = sketch.clone()
        else:
            self.sketch += sketch
        self.count += count
        self.tokens += batch.tokens
        self.calls += 1
        self.identity = (self.identity + batch.identity) & ((1 << 64) - 1)

    def measure(self, rows: Tensor) -> None:
        """Take the numbers of a call's tokens."""
        wide = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
        exact = torch.float64 if has_fp64(rows.device) else wide.dtype
        sums = torch.stack([torch.linalg.vector_norm(wide).square(), wide.sum()]).to(exact)
        low, high = torch.aminmax(wide)
        ends = torch.stack([high, -low])
        self.sums = sums if self.sums is None else self.sums + sums
        self.ends = ends if self.ends is None else torch.maximum(self.ends, ends)

    def read(self, count: int, found: Numbers) -> None:
        """Take the numbers of a call that were measured already."""
        squares, total, most, least = self.numbers
        self.numbers = [
            squares + found.norm * found.norm,
            total + found.mean * count,
            _most(most, found.high),
            _most(least, -found.low),
        ]

    def all_numbers(self) -> list[float]:
        """Squares, sum, largest and smallest over all calls."""
        squares, total, most, least = self.numbers
        if self.sums is not None and self.ends is not None:
            more, further = self.sums.cpu().double().tolist()
            high, low = self.ends.cpu().double().tolist()
            squares, total = squares + more, total + further
            most, least = _most(most, high), _most(least, low)
        return [squares, total, most, -least]


def _most(one: float, other: float) -> float:
    """The larger; NaN where either is."""
    return one + other if math.isnan(one) or math.isnan(other) else max(one, other)


class Logical:
    """The logical records of one stage, growing call by call.

    Args:
        side: the session's side directory.
        context: stage, step and rank.
        statistics: what measures the stage's tensors, just before they come here.
        tokens: which of them the model works on.
    """

    def __init__(
        self, side: Path, context: StageContext, statistics: Statistics, tokens: Tokens
    ) -> None:
        self._statistics = statistics
        statistics.readers.append(self._read)
        #: Records, and numbers that were measured already.
        self._waiting: list[tuple[_Record, Numbers, int]] = []
        name = f"{context.stage}-step{context.step}-rank{context.rank}.npz"
        self.path = side / "logical" / name
        self._records: dict[_Key, _Record] = {}
        self._calls: dict[tuple[str, str], int] = {}
        self._sequence = 0
        #: Which of them the model works on.
        self.tokens = tokens

    def taken(self, values: Iterable[Tensor], batch: Batch | None) -> Taken | None:
        """The first of some tensors that has a row for each token, or for each of its stretch."""
        if batch is None:
            return None
        stretch = self.tokens.stretch(batch)
        for tensor in values:
            local = getattr(tensor, "_local_tensor", tensor)
            if not local.is_floating_point() or local.is_nested or not has_values(local):
                continue
            for own in (batch, stretch):
                rows = None if own is None else own.rows(local.detach())
                if own is not None and rows is not None:
                    return Taken(tensor, rows, own)
        return None

    def cosines(
        self, angles: Iterable[Tensor], to: torch.dtype, batch: Batch | None
    ) -> Taken | None:
        """The cosines of each token's angles, from a table with a row for each position."""
        table = next(iter(angles), None)
        if table is None or batch is None or batch.positions is None:
            return None
        flat = table.detach().reshape(len(table), -1)
        if int(batch.positions.max()) >= len(flat):
            return None
        own = flat.index_select(0, torch.from_numpy(batch.positions).to(flat.device))
        return Taken(table, own.cos().to(to), batch, own=False)

    def chosen(self, choice: Choice, values: Tensor, batch: Batch | None) -> Taken | None:
        """What a router hands out, or the gradient at it: a number for each token and expert."""
        for own in () if batch is None else (batch, self.tokens.stretch(batch)):
            rows = None if own is None else own.rows(choice.dense(values))
            if own is not None and rows is not None:
                return Taken(values, rows, own, choice.is_map)
        return None

    def add(self, owner: Owner, direction: str, slot: str, taken: Taken | None) -> None:
        """Add one call's input or output, or a gradient of either, to its record."""
        if taken is None:
            return
        batch = taken.batch
        sketches: dict[tuple[int, ...] | None, tuple[Tensor, Tensor]] = {}
        # what holds nothing but these tokens has been measured
        whole = taken.own and taken.rows.numel() == taken.tensor.numel()
        known = self._statistics.measured(taken.tensor) if whole else None
        # the gradient at an output is laid out as the output
        side = slot if direction == "forward" else _OTHER[slot]
        width = int(taken.rows.shape[1])
        for piece in owner.places.pieces(owner.path, owner.module, direction, side, width):
            if piece.features not in sketches:
                rows = taken.rows
                if piece.features is not None:
                    own = torch.tensor(piece.features, device=rows.device)
                    rows = rows.index_select(1, own)
                sketches[piece.features] = rows, batch.sketch(rows, piece.first, piece.width)
            rows, sketch = sketches[piece.features]
            key = (piece.module, owner.op, direction, slot)
            record = self._records.get(key)
            if record is None:
                features = int(rows.shape[1])
                kind = taken.tensor.dtype if taken.own else taken.rows.dtype
                record = self._records[key] = _Record(piece, features, kind)
            record.add(batch, sketch, rows.numel())
            if known is None or piece.features is not None:
                record.measure(rows)
            else:
                self._waiting.append((record, known, rows.numel()))
            if record.calls == 1:  # in the order in which the first calls were complete
                self._sequence += 1
                self._calls[piece.module, direction] = self._sequence

    def _read(self) -> None:
        """All numbers of the stage's entry are there."""
        for record, found, count in self._waiting:
            record.read(count, found)
        self._waiting.clear()

    def publish(self) -> None:
        """Write the file with everything so far; nothing where there is nothing."""
        if not self._records and not self.tokens.skipped:
            return
        rows = list(self._records.items())
        sketches = np.zeros((len(rows), GROUPS, K))
        numbers = np.zeros((len(rows), 4))
        for at, (_, record) in enumerate(rows):
            assert record.sketch is not None
            found = record.sketch.detach().cpu().double().numpy()
            sketches[at, : len(found)] = found
            numbers[at] = record.all_numbers()
        with written(self.path) as temporary, temporary.open("wb") as handle:
            np.savez(
                handle,
                **{  # type: ignore[arg-type]
                    name: np.array([key[i] for key, _ in rows], dtype=np.str_)
                    for i, name in enumerate(("module", "op", "direction", "slot"))
                },
                dtype=np.array([record.dtype for _, record in rows], dtype=np.str_),
                sequence=_integers(self._calls[key[0], key[2]] for key, _ in rows),
                sketch=sketches,
                squares=numbers[:, 0],
                sum=numbers[:, 1],
                max=numbers[:, 2],
                min=numbers[:, 3],
                count=_integers(record.count for _, record in rows),
                tokens=_integers(record.tokens for _, record in rows),
                calls=_integers(record.calls for _, record in rows),
                first=_integers(record.piece.first for _, record in rows),
                features=_integers(record.features for _, record in rows),
                width=_integers(record.piece.width for _, record in rows),
                identity=np.array(
                    [[record.identity >> 32, record.identity & 0xFFFFFFFF] for _, record in rows],
                    dtype=np.int64,
                ).reshape(len(rows), 2),
                skipped=np.int64(self.tokens.skipped),
            )


_OTHER = {"input": "output", "output": "input"}


@dataclass(frozen=True)
class Owner:
    """The module that a record is of."""

    path: str
    op: str
    module: nn.Module
    places: Places


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of what a module takes or gives, in order, as deep as tuples and dicts go."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def _integers(values: Iterable[int]) -> Any:
    return np.fromiter(values, dtype=np.int64)
