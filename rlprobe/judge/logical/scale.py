"""By how much gradients of activations are scaled where ranks are of another number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlprobe.judge import replicas
from rlprobe.judge.logical.whole import Key, Part, Whole

if TYPE_CHECKING:
    from rlprobe.store.read import Run


def data_parallel(run: Run, stage: str) -> int:
    own = replicas.processes(run, stage)
    return max((process.dp for process in own), default=1)


def scale(sides: Sequence[Mapping[Key, Whole]], sizes: Sequence[int]) -> float:
    """By how much the target's loss is scaled: trainers that average over ranks scale it first.

    Gradients of activations then carry the number of data-parallel ranks. Either that ratio or
    none is taken, whichever is nearer to what the loss sends back first.
    """
    ratio = sizes[1] / sizes[0]
    if ratio == 1:
        return 1.0
    squares = products = 0.0
    for key, whole in sides[0].items():
        other = sides[1].get(key)
        if key[1:] == ("backward", "input") and other is not None and whole.finite and other.finite:
            squares += float(np.sum(whole.sketch**2))
            products += float(np.sum(whole.sketch * other.sketch))
    if not squares or products <= 0:
        return 1.0
    found = products / squares
    return ratio if abs(math.log(found / ratio)) < abs(math.log(found)) else 1.0


def scaled(key: Key, whole: Whole, factor: float) -> Whole:
    if factor == 1.0 or key[1] != "backward":
        return whole

    def part(own: Part) -> Part:
        return dataclasses.replace(
            own, sketch=own.sketch / factor, squares=own.squares / factor**2,
            sum=own.sum / factor, max=own.max / factor, min=own.min / factor,
        )  # fmt: skip

    def over(value: float | None) -> float | None:
        return None if value is None else value / factor

    return dataclasses.replace(
        whole,
        sketch=whole.sketch / factor,
        norm=whole.norm / factor,
        max=over(whole.max),
        min=over(whole.min),
        mean=over(whole.mean),
        parts=tuple(map(part, whole.parts)),
        replicas=tuple(map(part, whole.replicas)),
    )
