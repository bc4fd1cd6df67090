"""Metrics and environment of both runs, side by side."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from rlprobe.store.read import Run

#: Metrics of how long and how much, not of what was computed.
_UNRELATED = re.compile(r"perf|timing|time|throughput|memory|mfu|tokens_per|_len|seqlen", re.I)
#: Shown first; the others fold away.
_FIRST = re.compile(
    r"loss|grad_norm|entropy|(^|[/_])kl|reward|score|advantages/|values/|clipfrac|lr$"
)
_SHOWN = 16


@dataclass(frozen=True)
class MetricRow:
    """One metric at one step."""

    name: str
    step: int
    benchmark: float | None
    target: float | None
    difference: str


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


def metrics(benchmark: Run, target: Run) -> tuple[list[MetricRow], list[MetricRow]]:
    """Metrics to show, and further ones."""
    sides = [_by_step(run) for run in (benchmark, target)]
    rows = []
    for key in sorted(sides[0].keys() | sides[1].keys(), key=lambda key: (key[1], key[0])):
        number, name = key
        if _UNRELATED.search(name):
            continue
        b, t = (side.get(key) for side in sides)
        rows.append(MetricRow(name, number, b, t, _difference(b, t)))
    told = [row for row in rows if row.benchmark or row.target]  # zero on both sides says little
    first = [row for row in told if _FIRST.search(row.name)]
    rest = [row for row in rows if row not in first]
    return first[:_SHOWN], first[_SHOWN:] + rest


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


def _difference(b: float | None, t: float | None) -> str:
    if b is None or t is None:
        return "one side only"
    if b == t:
        return "0"
    if not (math.isfinite(b) and math.isfinite(t)) or b == 0:
        return f"{t - b:.2g} (absolute)"
    return f"{(t - b) / abs(b):+.2g}"


def environment(benchmark: Run, target: Run) -> tuple[list[Setting], list[Setting]]:
    """Settings that differ (device first), and those that are the same."""
    sides = [_flat(run) for run in (benchmark, target)]
    settings = [
        Setting(name, sides[0].get(name, "–"), sides[1].get(name, "–"))
        for name in sorted(sides[0].keys() | sides[1].keys())
    ]
    device = [s for s in settings if s.name in ("device", "device_name", "precision")]
    rest = [s for s in settings if s not in device]
    return [*device, *(s for s in rest if s.differs)], [s for s in rest if not s.differs]


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
