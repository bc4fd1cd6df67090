"""Records of whole stages by coordinates, where both sides are laid out alike.

There calls are judged, and these say the same tensors once more: what they were of must be the same
on both sides, and they may differ by no more than the calls that they are the sum of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from rlprobe import sketch_floors
from rlprobe.coordinates import GROUPS
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.judge.reasons import INHERITED
from rlprobe.judge.stage import Stage
from rlprobe.said import Said, of_side, say
from rlprobe.sketch import K, distance

#: Floors that one is never apart by where every call is within its own: the relative difference of
#: a sum is no more than the largest of its parts, and a sketch estimates it to 1 / 0.55 at worst.
OF_CALLS = 2.0
_SIDES = ("benchmark", "target")
_KEY = ["rank", "module", "direction", "slot"]
#: What a record was made of.
_OF = ["op", "dtype", "count", "tokens", "calls", "first", "features", "width", "identity"]


def check(evidence: Evidence) -> list[Said]:
    """What of them does not agree while the calls do, a sentence each."""
    found = []
    for name, finding in evidence.step.findings.items():
        stage = finding.stage
        if stage.laid_out is None and stage.misplaced is None:
            found += _of_stage(evidence, name, stage)
    return found


def _of_stage(evidence: Evidence, name: str, stage: Stage) -> list[Said]:
    tables = [run.logical(name) for run in (evidence.benchmark, evidence.target)]
    there = [
        None if table is None else table.filter(pl.col("step") == evidence.step.number)
        for table in tables
    ]
    left, right = there
    if left is None or right is None:
        return []
    said = []
    lone = [
        one.join(other, on=_KEY, how="anti", maintain_order="left")
        for one, other in ((left, right), (right, left))
    ]
    for side, rows in zip(_SIDES, lone, strict=True):
        if rows.height:
            said.append(
                say(
                    "{name}: {count:,} records by coordinates on the {side} only, first {first}",
                    name=name,
                    count=rows.height,
                    side=of_side(side),
                    first=rows.item(0, "module"),
                )
            )
    both = left.join(right, on=_KEY, suffix="_target", maintain_order="left")
    other = both.filter(
        pl.any_horizontal(pl.col(column) != pl.col(f"{column}_target") for column in _OF)
    )
    if other.height:
        first = other.row(0, named=True)
        column = next(one for one in _OF if first[one] != first[f"{one}_target"])
        said.append(
            say(
                "{name}: {count:,} records by coordinates are of other elements, first {first} "
                "({column} {benchmark} against {target})",
                name=name,
                count=other.height,
                first=first["module"],
                column=column,
                benchmark=first[column],
                target=first[f"{column}_target"],
            )
        )
    return [*said, *_apart(name, stage, both)]


def floors(rows: pl.DataFrame) -> dict[tuple[str, str, str], float]:
    """By module, direction and slot the widest floor of its calls, where all of them agree."""
    excused = pl.col("excused_by").is_not_null() & (pl.col("excused_by") != INHERITED)
    agree = pl.col("judged") & ~pl.col("beyond") & ~excused.fill_null(False)
    key = ("module", "direction", "slot")
    calls = rows.select(*key, "floor", agree=agree)
    each = calls.group_by(key).agg(pl.col("floor").max(), pl.col("agree").all())
    return {
        (module, direction, slot): floor or 0.0
        for module, direction, slot, floor, agree in each.iter_rows()
        if agree
    }


def _apart(name: str, stage: Stage, both: pl.DataFrame) -> list[Said]:
    known = floors(stage.rows)
    odd = [
        (row["module"], apart)
        for row in both.iter_rows(named=True)
        if (key := (row["module"], row["direction"], row["slot"])) in known
        and not (apart := _error(row)) <= OF_CALLS * max(known[key], sketch_floors.DEVICES)
    ]
    if not odd:
        return []
    return [
        say(
            "{name}: {count:,} records by coordinates differ while those of the calls agree, "
            "first {first} ({error:.3g})",
            name=name,
            count=len(odd),
            first=odd[0][0],
            error=odd[0][1],
        )
    ]


def _error(row: Mapping[str, Any]) -> float:
    """How far two are apart, relative to the norm: by their sketches or by a statistic, whichever
    says more. NaN where one side is not finite."""
    mine, other = (
        {key: row[f"{key}{end}"] for key in ("sketch", "squares", "sum", "max", "min", "count")}
        for end in ("", "_target")
    )
    sketches = [np.asarray(one["sketch"], np.float64).reshape(GROUPS, K) for one in (mine, other)]
    finite = [
        bool(np.isfinite(sketch).all()) and math.isfinite(one["squares"])
        for sketch, one in zip(sketches, (mine, other), strict=True)
    ]
    if not any(finite):
        return 0.0
    if not all(finite):
        return math.nan
    norms = [math.sqrt(max(0.0, one["squares"])) for one in (mine, other)]
    apart = [
        distance(sketches[0].sum(0), sketches[1].sum(0)),
        abs(norms[0] - norms[1]),
        # no element, and no mean of all, differs by more than the length of the difference
        abs(mine["max"] - other["max"]),
        abs(mine["min"] - other["min"]),
        abs(mine["sum"] - other["sum"]) / math.sqrt(max(mine["count"], 1)),
    ]
    if not all(map(math.isfinite, apart)):
        return math.nan
    largest = max(apart)
    return largest / norms[0] if norms[0] else (math.inf if largest else 0.0)
