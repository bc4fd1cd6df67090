"""Weights at the start: every parameter is the same on both sides.

Equal layouts compare digests. Shards of other layouts are compared unsharded: by the sum of their
sketches where their places are known, else by norms, which cannot see everything and are said to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, listed, opened, shut
from rlprobe.judge import unshard

ITEM = "weights"
#: Sketches of equal tensors agree to this, relative to the norm, whatever the sharding.
_SKETCH_TOLERANCE = 3e-6
_NORM_TOLERANCE = 3e-6
#: A sketch distance near sqrt(2) of the norm with equal norms: the same numbers, elsewhere.
_PERMUTED = 0.3


def check(evidence: Evidence) -> tuple[GateItem, Shut | None]:
    """Item ``weights``: parameters when each model first enters a stage of the step."""
    step = evidence.step.number
    tables = [_first_entries(run.weights(), step) for run in (evidence.benchmark, evidence.target)]
    if any(table is None for table in tables):
        lacking = [
            side
            for side, table in zip(("benchmark", "target"), tables, strict=True)
            if table is None
        ]
        return shut(
            ITEM,
            f"no weights were digested by the {' and the '.join(lacking)}",
            "run with capture.provenance on: a difference in weights would be blamed on a module",
        ), None
    left, right = (table for table in tables if table is not None)
    stages_seen = [
        s
        for s in stages.STAGES
        if s in set(left.get_column("stage")) and s in set(right.get_column("stage"))
    ]
    if not stages_seen:
        return shut(
            ITEM,
            "no stage has digested weights on both sides",
            "capture the same stages on both sides",
        ), None
    by_norm = compared = 0
    for stage in stages_seen:
        result = _stage(
            left.filter(pl.col("stage") == stage), right.filter(pl.col("stage") == stage)
        )
        compared += result.compared
        by_norm += result.by_norm
        if result.wrong:
            return _different(stage, result)
    if by_norm:
        return caveat(
            ITEM,
            f"{compared} parameters agree, {by_norm} of them by norm only (sharded differently, "
            "without sketches)",
            "capture with sketches to compare shards element by element",
        ), None
    return opened(
        ITEM, f"{compared} parameters agree in {len(stages_seen)} stages: {listed(stages_seen, 6)}"
    ), None


class _Result:
    def __init__(self) -> None:
        self.compared = 0
        self.by_norm = 0
        self.missing: list[str] = []
        #: name -> what differs
        self.wrong: dict[str, dict[str, Any]] = {}


def _first_entries(table: pl.DataFrame | None, step: int) -> pl.DataFrame | None:
    """Each stage's first reading of the step (a stage may be entered twice, as with LoRA)."""
    if table is None:
        return None
    here = table.filter(pl.col("step") == step)
    if here.is_empty():
        return None
    return here.unique(["stage", "role", "rank", "name"], keep="first", maintain_order=True)


def _stage(left: pl.DataFrame, right: pl.DataFrame) -> _Result:
    result = _Result()
    sides = [_parameters(frame) for frame in (left, right)]
    names = [*sides[0], *(name for name in sides[1] if name not in sides[0])]
    for name in names:
        b, t = (side.get(name) for side in sides)
        if b is None or t is None:
            result.wrong[name] = {
                "what": f"is on the {'target' if b is None else 'benchmark'} only"
            }
            continue
        result.compared += 1
        wrong = _parameter(b, t, result)
        if wrong is not None:
            result.wrong[name] = wrong
    return result


def _parameters(frame: pl.DataFrame) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in frame.sort("rank", maintain_order=True).iter_rows(named=True):
        found.setdefault(row["name"], []).append(row)
    return {name: _with_elements(rows) for name, rows in found.items()}


def _with_elements(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shards that hold anything: a parameter of fewer rows than ranks leaves some empty."""
    return [row for row in rows if 0 not in row["local_shape"]] or rows[:1]


def _parameter(
    b: list[dict[str, Any]], t: list[dict[str, Any]], result: _Result
) -> dict[str, Any] | None:
    """What is different about one parameter, None where nothing is."""
    if list(b[0]["shape"]) != list(t[0]["shape"]):
        return {"what": f"has shape {list(b[0]['shape'])} against {list(t[0]['shape'])}"}
    same_layout = [(r["local_shape"], r["offset"]) for r in b] == [
        (r["local_shape"], r["offset"]) for r in t
    ]
    digests = [[r["digest"] for r in rows] for rows in (b, t)]
    known = all(digest is not None for side in digests for digest in side)
    dtypes = b[0]["dtype"] == t[0]["dtype"]
    if same_layout and known and dtypes:
        if digests[0] == digests[1]:
            return None
        return _how(b, t)
    sketches, norms = (
        [unshard.sketch(rows) for rows in (b, t)],
        [unshard.norm(rows) for rows in (b, t)],
    )
    if sketches[0] is not None and sketches[1] is not None and norms[0] is not None:
        distance = float(np.linalg.norm(sketches[0] - sketches[1]))
        # Another dtype rounds every weight once. Zeros (biases at the start) are exact.
        tolerance = _SKETCH_TOLERANCE if dtypes else 2.0**-8
        return None if distance <= tolerance * norms[0] else _how(b, t)
    result.by_norm += 1
    if norms[0] is None or norms[1] is None:
        return {"what": "has neither digest nor norm on both sides"}
    off = abs(norms[1] - norms[0]) / norms[0] if norms[0] else abs(norms[1])
    return None if off <= (_NORM_TOLERANCE if dtypes else 2.0**-8) else _how(b, t)


def _how(b: list[dict[str, Any]], t: list[dict[str, Any]]) -> dict[str, Any]:
    """How a parameter's values differ."""
    norms = [unshard.norm(rows) for rows in (b, t)]
    sketches = [unshard.sketch(rows) for rows in (b, t)]
    found: dict[str, Any] = {"norms": norms, "what": "differs"}
    if norms[0] and norms[1] is not None:
        found["norm_ratio"] = norms[1] / norms[0]
        if sketches[0] is not None and sketches[1] is not None:
            distance = float(np.linalg.norm(sketches[0] - sketches[1])) / norms[0]
            found["distance"] = distance
            equal_norms = abs(found["norm_ratio"] - 1.0) < 1e-6
            if equal_norms and distance > _PERMUTED:
                found["what"] = "has the same norm and other values: its elements are permuted"
                found["permuted"] = True
            else:
                found["what"] = f"differs by {distance:.2g} of its norm"
        else:
            found["what"] = f"differs; its norm is {found['norm_ratio']:.6g} of the benchmark's"
    return found


def _different(stage: str, result: _Result) -> tuple[GateItem, Shut]:
    names = list(result.wrong)
    first = result.wrong[names[0]]
    permuted = [name for name in names if result.wrong[name].get("permuted")]
    said = f"{stage}: {len(names)} of {result.compared} parameters differ: {listed(names)}"
    how = f"{names[0]} {first['what']}"
    if permuted:
        action = (
            "check the conversion of the checkpoint: fused or permuted heads (QKV), transposed or "
            "swapped weights"
        )
    else:
        action = "load the same checkpoint on both sides; compare the conversion and the dtype"
    # One module's parameters point at it; everything at once points at what was loaded.
    modules = {name.rpartition(".")[0] for name in names}
    module = modules.pop() if len(modules) == 1 else None
    values = [{"parameter": names[0], "norm": norm} for norm in first.get("norms", [None, None])]
    return shut(ITEM, f"{said}. {how}", action), Shut(
        "weights", ITEM, stage, 0, module or None, None, values[0], values[1], [said, how]
    )
