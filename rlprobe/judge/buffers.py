"""What modules of both sides keep beside their parameters, held against each other.

Rotary frequencies, masks and running statistics are no parameters and no activations: where they
differ, what is computed of them may stay below floors that are made for what is computed. They
stand in the same numbers on every device but for the round-off of making them, so that a larger
difference is one by itself.

Between unlike back ends only what the Hugging Face model has too is held (``logical``): what else a
back end keeps is its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rlprobe import sketch_floors, stages
from rlprobe.judge.roundoff import FP32, UNIT
from rlprobe.said import COMMA, Said, joined, listed, of_side, say

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: Powers and sines of fp32 are off by some units on any device.
_MADE = 16 * FP32
#: Norms of the same numbers, summed by two devices.
_SUMMED = 1e-6


@dataclass(frozen=True)
class Buffer:
    """A buffer that differs."""

    name: str
    #: Dtypes, benchmark's first.
    dtypes: tuple[str, str]
    #: Relative, of all its numbers; None where nothing measures it.
    error: float | None
    floor: float
    #: The target's ranks that have it so, where others have it as the benchmark; empty: all.
    ranks: tuple[int, ...] = ()

    @property
    def is_beyond(self) -> bool:
        """Whether its numbers are known to differ by more than making them does."""
        return self.error is not None and self.error > self.floor

    @property
    def is_shorter(self) -> bool:
        """Whether the target keeps it in a shorter format."""
        units = [UNIT.get(dtype) for dtype in self.dtypes]
        return units[0] is not None and units[1] is not None and units[1] > units[0]

    @property
    def module(self) -> str:
        """The module that keeps it."""
        return self.name.rpartition(".")[0]

    @property
    def said(self) -> Said:
        """It in words."""
        if self.error is None:
            text = say("{name} differs, and nothing says by how much", name=self.name)
        elif self.is_beyond:
            text = say(
                "{name} differs by {error:.2g} of its norm", name=self.name, error=self.error
            )
        else:
            text = say("{name} has the same numbers", name=self.name)
        if self.dtypes[0] != self.dtypes[1]:
            text += say(
                " and is {target} on the target instead of {benchmark}",
                target=self.dtypes[1].removeprefix("torch."),
                benchmark=self.dtypes[0].removeprefix("torch."),
            )
        if self.ranks:
            text += say(" on rank {ranks} alone", ranks=listed(map(str, self.ranks)))
        return text


@dataclass(frozen=True)
class Buffers:
    """The buffers of a model as it entered a stage."""

    #: How many both sides keep under one name and in one shape.
    compared: int = 0
    differing: tuple[Buffer, ...] = field(default=())
    #: What cannot be held: kept by one side alone, in another shape, or recorded with numbers that
    #: its digest contradicts.
    unheld: tuple[Said, ...] = field(default=())

    @property
    def beyond(self) -> tuple[Buffer, ...]:
        """Those whose numbers are known to differ."""
        return tuple(one for one in self.differing if one.is_beyond)

    @property
    def said(self) -> Said:
        """Those that differ, in words: one a module's and leaf's name, as layers repeat them."""
        kinds = {(one.name.rpartition(".")[2], one.dtypes, one.is_beyond): one
                 for one in reversed(self.differing)}  # fmt: skip
        shown = [one.said for one in reversed(list(kinds.values()))][:_SHOWN]
        text = joined(shown, COMMA)
        more = len(self.differing) - len(shown)
        return text + say(", and {count} more", count=more) if more else text


_SHOWN = 3


class _Kept(NamedTuple):
    """One rank's buffer."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    norm: float | None
    sketch: tuple[float, ...] | None
    logical: bool


#: By name and rank.
_Side = dict[str, dict[int, _Kept]]


def compare(benchmark: Run, target: Run, stage: str, step: int) -> Buffers | None:
    """The buffers with which a model enters a stage; None where neither side says.

    What changes within the step on both sides (running statistics) is held where its model first
    enters a stage: afterwards it inherits what was computed.

    Raises:
        StoreError: what a run says is damaged.
    """
    lines = [
        [line for line in run.buffers() if line["step"] == step] for run in (benchmark, target)
    ]
    sides = [_of_stage(own, stage) for own in lines]
    unlike = _backends(benchmark) != _backends(target)
    if not all(sides):
        silent = "target" if sides[0] else "benchmark"
        return None if unlike or not any(sides) else Buffers(unheld=(_none(silent),))
    # what changes on one side alone is what makes the sides differ
    moving = _moving(lines[0]) & _moving(lines[1])
    role = stages.MODEL_ROLE.get(stage, "")
    late = any(_is_earlier(line, stage, role) for own in lines for line in own)
    found, unheld, compared = [], [], 0
    for name in dict.fromkeys((*sides[0], *sides[1])):
        left, right = (side.get(name, {}) for side in sides)
        if late and (role, name) in moving:
            continue
        if not left or not right:
            # what one back end keeps another may make anew
            unheld += [] if unlike else [_alone(name, "benchmark" if left else "target")]
            continue
        if unlike and not all(one.logical for side in (left, right) for one in side.values()):
            continue
        shapes = [{one.shape for one in side.values()} for side in (left, right)]
        if len(shapes[0] | shapes[1]) > 1:
            # each rank may have a part of it; the same ranks have the same parts
            if not unlike and left.keys() == right.keys():
                unheld += _reshaped(name, left, right)
            continue
        compared += 1
        odd = _odd(name, left, right)
        if odd is not None:
            found.append(odd)
        elif _is_contradicted(left, right):
            unheld.append(
                say("{name} has one digest and other numbers on the two sides", name=name)
            )
    return Buffers(compared, tuple(found), tuple(unheld))


def _none(side: str) -> Said:
    return say("no buffers were recorded on the {side}", side=of_side(side))


def _alone(name: str, side: str) -> Said:
    return say("{name} is kept on the {side} alone", name=name, side=of_side(side))


def _reshaped(name: str, left: dict[int, _Kept], right: dict[int, _Kept]) -> list[Said]:
    for rank, kept in left.items():
        if kept.shape != right[rank].shape:
            return [
                say(
                    "{name} has the shape {target} on the target instead of {benchmark}",
                    name=name,
                    target=list(right[rank].shape),
                    benchmark=list(kept.shape),
                )
            ]
    return []


def _is_contradicted(left: dict[int, _Kept], right: dict[int, _Kept]) -> bool:
    """Whether equal digests stand beside other numbers: these were not recorded of the buffer."""
    for rank in left.keys() & right.keys():
        both = left[rank], right[rank]
        if len({(one.dtype, one.digest) for one in both}) > 1:
            continue
        if len({one.norm is None for one in both}) > 1:
            return True
        if len({one.sketch is None for one in both}) > 1:
            return True
        norms = [one.norm or 0.0 for one in both]
        if abs(norms[0] - norms[1]) > _SUMMED * max(norms):
            return True
        if (_error(*both) or 0.0) > sketch_floors.DEVICES:
            return True
    return False


def _backends(run: Run) -> frozenset[str]:
    return frozenset((process.backend or "").lower() for process in run.manifest.layout)


def _is_earlier(line: dict[str, Any], stage: str, role: str) -> bool:
    own = stages.MODEL_ROLE.get(line["stage"], "")
    return own == role and stages.order(line["stage"]) < stages.order(stage)


def _of_stage(lines: list[dict[str, Any]], stage: str) -> _Side:
    found: _Side = {}
    for line in lines:
        if line["stage"] != stage:
            continue
        for one in line["buffers"]:
            sketch = None if one["sketch"] is None else tuple(map(float, one["sketch"]))
            kept = _Kept(one["dtype"], tuple(one["shape"]), one["digest"], one["norm"], sketch,
                         one["logical"])  # fmt: skip
            found.setdefault(one["name"], {}).update(dict.fromkeys(line["ranks"], kept))
    return found


def _moving(lines: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Role and name of what does not stay the same over the stages of a step."""
    known: dict[tuple[str, str, int], str] = {}
    found = set[tuple[str, str]]()
    for line in lines:
        role = stages.MODEL_ROLE.get(line["stage"], "")
        for one in line["buffers"]:
            for rank in line["ranks"]:
                if known.setdefault((role, one["name"], rank), one["digest"]) != one["digest"]:
                    found.add((role, one["name"]))
    return found


def _odd(name: str, left: dict[int, _Kept], right: dict[int, _Kept]) -> Buffer | None:
    """How a buffer differs: rank by rank where both sides have the same ranks, else by any."""
    alike = left.keys() == right.keys()
    every = list(left.values())
    wrong: dict[int, Buffer] = {}
    for rank, own in sorted(right.items()):
        against = [left[rank]] if alike else every
        found = [_difference(name, other, own) for other in against]
        if all(found):
            wrong[rank] = min((one for one in found if one), key=_size)
    if not wrong:
        return None
    worst = max(wrong.values(), key=_size)
    ranks = () if len(wrong) == len(right) else tuple(wrong)
    return Buffer(name, worst.dtypes, worst.error, worst.floor, ranks)


def _size(buffer: Buffer) -> tuple[bool, float]:
    return buffer.is_beyond, buffer.error or 0.0


def _difference(name: str, left: _Kept, right: _Kept) -> Buffer | None:
    if (left.dtype, left.digest) == (right.dtype, right.digest):
        return None
    units = [UNIT.get(one.dtype) for one in (left, right)]
    dtypes = (left.dtype, right.dtype)
    if (units[0] is None) != (units[1] is None):  # truth values told as numbers
        return Buffer(name, dtypes, None, 0.0)
    error = _error(left, right)
    floor = _floor(min(unit for unit in units if unit is not None), left.shape) if all(units) else 0
    if error is not None and error <= floor and left.dtype == right.dtype:
        return None
    return Buffer(name, dtypes, error, floor)


def _floor(unit: float, shape: tuple[int, ...]) -> float:
    """What making a buffer anew may make it differ by: a table has angles of large positions."""
    rows = shape[0] if len(shape) > 1 else 0
    return unit + _MADE + FP32 * rows


def _error(left: _Kept, right: _Kept) -> float | None:
    if left.sketch is None or right.sketch is None or len(left.sketch) != len(right.sketch):
        if left.norm is None or right.norm is None:
            return None
        apart = abs(left.norm - right.norm)
        # equal norms of other numbers say nothing
        return apart / (left.norm or 1.0) if apart else None
    apart = math.dist(left.sketch, right.sketch)
    return apart / (left.norm or 1.0)
