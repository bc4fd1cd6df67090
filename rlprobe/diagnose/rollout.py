"""Training against rollout at every captured step: the figures of a gap, and what it is made of.

What is measured is in :mod:`rlprobe.diagnose.mismatch` (log-probs) and
:mod:`rlprobe.diagnose.engine_layers` (layers and routers). Here it is put together, a row a step,
for the page and for ``diagnosis.json``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlprobe.diagnose import engine_layers, mismatch
from rlprobe.diagnose.engine_layers import Layers
from rlprobe.diagnose.mismatch import Mismatch
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.store.read import Run

#: Log-probs of an engine that a row is against.
AGAINST = (mismatch.GENERATED, mismatch.PREFILL, mismatch.DECODE)


@dataclass(frozen=True)
class Gap:
    """Training against one engine's log-probs, on one side at one step."""

    step: int
    side: str
    against: str
    found: Mismatch


@dataclass(frozen=True)
class Parts:
    """What a step's gap is made of; None of whatever is not known."""

    step: int
    #: Mean |d| of the benchmark: what engine and training make of the same numbers.
    method: float | None
    #: Mean difference of both sides' log-probs of the same tokens: the devices'.
    training: float | None
    prefill: float | None
    decode: float | None
    #: Share of tokens whose likeliest two lie within ``within`` nats.
    near_ties: float | None
    within: float | None
    #: Layers, by side.
    layers: Mapping[str, Layers]


@dataclass(frozen=True)
class Rollout:
    """All of it."""

    gaps: list[Gap]
    parts: list[Parts]

    def as_values(self) -> list[dict[str, Any]]:
        """A row a step: ``{step, gaps, parts, layers}``, numbers that are none null."""
        return [_plain(self, parts) for parts in self.parts]


def of(benchmark: Run, target: Run, also: int | None = None) -> Rollout:
    """Every captured step of two runs; no steps where no engine's log-probs are known.

    Args:
        benchmark, target: the two runs.
        also: a step that is looked at in any case.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    sides = {BENCHMARK: benchmark, TARGET: target}
    steps = {*benchmark.manifest.steps, *target.manifest.steps, *(() if also is None else (also,))}
    gaps = [gap for step in sorted(steps) for gap in _gaps(sides, step)]
    if not gaps:
        return Rollout([], [])
    layers = {side: engine_layers.layers(run) for side, run in sides.items()}
    return Rollout(gaps, [_parts(sides, gaps, layers, step) for step in sorted(steps)])


def _gaps(sides: Mapping[str, Run], step: int) -> Iterator[Gap]:
    for against in AGAINST:
        for side, run in sides.items():
            found = mismatch.measure(run, step, against)
            if found is not None:
                yield Gap(step, side, against, found)


def _parts(
    sides: Mapping[str, Run],
    gaps: list[Gap],
    layers: Mapping[str, Mapping[int, Layers]],
    step: int,
) -> Parts:
    benchmark, target = sides[BENCHMARK], sides[TARGET]
    own = next(
        (
            gap.found
            for gap in gaps
            if (gap.step, gap.side, gap.against) == (step, BENCHMARK, mismatch.GENERATED)
        ),
        None,
    )
    known = own if own is not None and own.tokens else None
    within = None if known is None else 2 * known.p99_abs
    training, prefill, decode = (
        mismatch.moved(benchmark, target, step, name)
        for name in (mismatch.TRAINED, mismatch.PREFILL, mismatch.DECODE)
    )
    return Parts(
        step=step,
        method=None if known is None else known.mean_abs,
        training=training,
        prefill=prefill,
        decode=decode,
        near_ties=None if within is None else mismatch.near_ties(benchmark, step, within),
        within=within,
        layers={side: of_side[step] for side, of_side in layers.items() if step in of_side},
    )


def _plain(rollout: Rollout, parts: Parts) -> dict[str, Any]:
    gaps = [
        {"side": gap.side, "against": gap.against, **_numbers(gap.found)}
        for gap in rollout.gaps
        if gap.step == parts.step
    ]
    made = {
        field.name: _number(getattr(parts, field.name))
        for field in dataclasses.fields(parts)
        if field.name not in ("step", "layers")
    }
    return {
        "step": parts.step,
        "gaps": gaps,
        "parts": made,
        "layers": {side: _of_layers(found) for side, found in parts.layers.items()},
    }


def _numbers(found: Mismatch) -> dict[str, Any]:
    return {
        field.name: _number(getattr(found, field.name))
        for field in dataclasses.fields(found)
        if field.name != "by_position"
    }


def _of_layers(found: Layers) -> dict[str, Any]:
    """Where the two part, and what routers chose."""
    begins, routed = found.begins, found.routed
    return {
        "blocks": len(found.blocks),
        "begins": None if begins is None else begins.module,
        "routed_otherwise": None if routed is None else routed[0],
        "routed": None if routed is None else routed[1],
    }


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
