"""Metrics and environment of both runs, side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from markupsafe import Markup

from rlprobe import stages
from rlprobe.judge.curves import LEFT, Curve, ratio
from rlprobe.judge.extent import is_computed
from rlprobe.report import words
from rlprobe.said import Message
from rlprobe.store.read import Run

#: Shown first; the others fold away.
_FIRST = re.compile(
    r"loss|grad_norm|entropy|(^|[/_])kl|reward|score|advantages/|values/|clipfrac|lr$"
)


@dataclass(frozen=True)
class MetricRow:
    """One metric at one step."""

    name: str
    step: int
    benchmark: float | None
    target: float | None
    difference: Markup


@dataclass(frozen=True)
class Setting:
    """One fact about the two environments."""

    name: str
    benchmark: str
    target: str

    @property
    def differs(self) -> bool:
        """Whether the sides disagree."""
        return self.benchmark != self.target


@dataclass(frozen=True)
class WeightRow:
    """Parameters of one model as it entered its first stage of the step."""

    model: str
    same: int
    different: int
    alone: int


def weights(benchmark: Run, target: Run, step: int) -> list[WeightRow]:
    """How many parameters have the same digest on both sides, by model role.

    Shards of another layout have other names or digests: the gate says whether whole tensors agree.
    """
    sides = [_digests(run, step) for run in (benchmark, target)]
    rows = []
    for model in sorted(sides[0].keys() | sides[1].keys()):
        left, right = (side.get(model, {}) for side in sides)
        shared = left.keys() & right.keys()
        same = sum(left[name] == right[name] for name in shared)
        alone = len(left.keys() ^ right.keys())
        rows.append(WeightRow(model, same, len(shared) - same, alone))
    return rows


def _digests(run: Run, step: int) -> dict[str, dict[tuple[int, str], str]]:
    table = run.weights()
    if table is None:
        return {}
    found: dict[str, dict[tuple[int, str], str]] = {}
    # an engine's copy is held against its own trainer's (gate item "engine weights")
    own = table.filter(step=step).filter(~pl.col("stage").is_in(stages.ENGINE_STAGES))
    for stage, rank, name, digest in own.select("stage", "rank", "name", "digest").iter_rows():
        model = stages.MODEL_ROLE.get(stage, stage)
        found.setdefault(model, {}).setdefault((rank, name), digest)
    return found


#: (Trainer's step, name) -> both sides' values of what is recorded rather than reported.
Recorded = Mapping[tuple[int, str], tuple[float, float]]


def metrics(benchmark: Run, target: Run, recorded: Recorded) -> list[MetricRow]:
    """Metrics of both runs, those that people look at first.

    Args:
        recorded: what the records say beside the trainer (norms of gradients by group).
    """
    sides = [_by_step(run) for run in (benchmark, target)]
    for key, values in recorded.items():
        for side, value in zip(sides, values, strict=True):
            side[key] = value
    rows = []
    for key in sorted(sides[0].keys() | sides[1].keys(), key=lambda key: (key[1], key[0])):
        number, name = key
        if not is_computed(name):
            continue
        b, t = (side.get(key) for side in sides)
        rows.append(MetricRow(name, number, b, t, _difference(b, t)))
    # zero on both sides says little
    rows = [row for row in rows if row.benchmark or row.target]
    return sorted(rows, key=lambda row: _FIRST.search(row.name) is None)


#: Curves drawn at most: those that people look at first.
_CURVES = 24


def curves(every: Sequence[MetricRow], begin: int, judged: Sequence[Curve]) -> list[dict[str, Any]]:
    """Each metric over the trainer's steps on both sides: name, steps, benchmark, target.

    Where it was judged also what it may be, ``low`` and ``high``, and the ``verdict``; those that
    left come first.

    Args:
        every: of :func:`metrics`.
        begin: the trainer's number of the first step.
        judged: of the diagnosis.
    """
    known = {curve.metric: curve for curve in judged}
    by_name: dict[str, dict[int, MetricRow]] = {}
    for row in every:
        by_name.setdefault(row.name, {})[row.step] = row
    found = []
    gone = [n for n in by_name if (c := known.get(n)) is not None and c.verdict == LEFT]
    for name in [*gone, *(n for n in by_name if n not in gone)][:_CURVES]:
        rows = by_name[name]
        steps = sorted(rows)
        drawn: dict[str, Any] = {
            "name": name,
            "steps": steps,
            "benchmark": [_finite(rows[step].benchmark) for step in steps],
            "target": [_finite(rows[step].target) for step in steps],
        }
        curve = known.get(name)
        if curve is not None and curve.band:
            band = {begin + step: (low, high) for step, low, high in curve.band}
            drawn["verdict"] = curve.verdict
            drawn["low"], drawn["high"] = (
                [_finite(band.get(step, (None, None))[side]) for step in steps] for side in (0, 1)
            )
        found.append(drawn)
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class CurveRow:
    """A metric's verdict."""

    name: str
    verdict: str
    #: The trainer's step where it left, or came nearest to that.
    step: int | None
    benchmark: float | None
    target: float | None
    difference: float | None
    allowed: float | None
    why: Markup | None


def verdicts(
    judged: Sequence[Curve], begin: int, messages: Mapping[str, Message]
) -> list[CurveRow]:
    """Curves that have a verdict over several steps, those that left first, then by nearness.

    Args:
        judged: of the diagnosis.
        begin: the trainer's number of the first step.
        messages: how sentences of the diagnosis were made.
    """
    rows = [c for c in judged if c.band]
    rows.sort(key=lambda c: (c.verdict != LEFT, c.step or 0, -ratio(c)))
    return [
        CurveRow(
            c.metric, c.verdict, None if c.at is None else begin + c.at, c.benchmark, c.target,
            c.difference, c.allowed, words.sentence(c.why, messages) if c.why else None,
        )
        for c in rows
    ]  # fmt: skip


def _by_step(run: Run) -> dict[tuple[int, str], float]:
    found = {}
    for line in run.metrics():
        values = line.get("metrics")
        number = line.get("trainer_step", line.get("step"))
        if not isinstance(values, dict) or not isinstance(number, int):
            continue
        for name, value in values.items():
            if isinstance(value, int | float):
                found[number, str(name)] = float(value)
    return found


def _difference(b: float | None, t: float | None) -> Markup:
    if b is None or t is None:
        return words.both("one_side")
    if b == t:
        return Markup("0")
    if not (math.isfinite(b) and math.isfinite(t)) or b == 0:
        return words.both("absolute", n=f"{t - b:.2g}")
    return Markup(f"{(t - b) / abs(b):+.2g}")


def environment(benchmark: Run, target: Run) -> tuple[list[Setting], list[Setting]]:
    """What differs between the sides (device first), and what is the same."""
    sides = [_flat(run) for run in (benchmark, target)]
    settings = [
        Setting(name, sides[0].get(name, "–"), sides[1].get(name, "–"))
        for name in sorted(sides[0].keys() | sides[1].keys())
    ]
    settings.sort(key=lambda s: s.name not in ("device", "device_name", "precision"))
    return [s for s in settings if s.differs], [s for s in settings if not s.differs]


def _flat(run: Run) -> dict[str, str]:
    found: dict[str, set[str]] = {}

    def walk(value: Any, prefix: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{prefix}.{key}" if prefix else str(key))
        else:
            found.setdefault(prefix, set()).add(str(value))

    for process in run.environment().values():
        walk(process, "")
    flat = {name: ", ".join(sorted(values))[:300] for name, values in found.items()}
    declared = run.manifest.declared
    return {"device": str(declared.get("device", "?")),
            "precision": str(declared.get("precision", "?")), **flat}  # fmt: skip
