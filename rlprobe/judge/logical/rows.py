"""Rows of a comparison, one a record of a whole stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from rlprobe.coordinates import groups
from rlprobe.judge import unshard
from rlprobe.judge.logical.ranks import Place, farthest, one_rank
from rlprobe.judge.logical.whole import Key, Sketch, Whole
from rlprobe.judge.unshard import Parameter
from rlprobe.sketch import K, deviation, distance
from rlprobe.sketch_floors import DEVICES, SHARDED, UNSEEN

if TYPE_CHECKING:
    from rlprobe.store.read import Run


OTHER_TOKENS = "the sides' records are of other tokens"


OTHER_WIDTH = "of another width on the other side"


INCOMPLETE = "not all shards were recorded"


JOINED = "all calls of the stage, by sample, position and feature"


_PER_CALL = 4


#: Slots of a call in the order in which a dump has them; parameters come between.
_SLOTS = (
    ("forward", "input"), ("backward", "input"), ("forward", "output"), ("backward", "output"),
)  # fmt: skip


_SHARED = ("step", "rank", "rank_benchmark", "rank_target", "module", "op", "call", "direction")


class Rows:
    """Rows of a comparison, one a logical record, as they are built.

    Args:
        step: captured step.
        order: of modules' calls.
        divided: modules that are another part of the model on either side, under one name.
    """

    def __init__(
        self,
        step: int,
        order: Mapping[tuple[str, str], int],
        divided: frozenset[str] = frozenset(),
    ) -> None:
        self._step = step
        self._divided = divided
        self._order = order
        self._rows: list[dict[str, Any]] = []
        self.sketches: dict[tuple[int, str], tuple[Sketch, Sketch]] = {}
        self.places: dict[str, Place] = {}
        self.names: dict[Key, str] = {}
        self.paired = self.strange = 0

    def add(self, key: Key, benchmark: Whole | None, target: Whole | None) -> None:
        """The row of a record; a side that lacks it is None."""
        module, direction, slot = key
        if module in self._divided and benchmark is not None and target is not None:
            self.add(key, benchmark, None)
            self.add(key, None, target)
            return
        row: dict[str, Any] = {
            "step": self._step,
            "rank": 0,
            "rank_benchmark": 0,
            "rank_target": 0,
            "order": _PER_CALL * self._order[module, direction] + _SLOTS.index((direction, slot)),
            "module": module,
            "call": 0,
            "direction": direction,
            "slot": slot,
            "index": "0",
        }
        for side, whole in (("benchmark", benchmark), ("target", target)):
            if whole is not None:
                name = f"Module.{module}.{whole.op}.{direction}.0.{slot}.0"
                # the benchmark's name and class, where it has one
                row = {"name": name, "op": whole.op} | row | _numbers(side, name, whole)
        self.names[key] = row["name"]
        if benchmark is None or target is None:
            row["status"] = "target_only" if benchmark is None else "benchmark_only"
        else:
            row |= self._measured(row["name"], benchmark, target)
        self._rows.append(row)

    def _measured(self, name: str, benchmark: Whole, target: Whole) -> dict[str, Any]:
        if why := _unpaired(benchmark, target):
            self.strange += why == OTHER_TOKENS
            return {"status": "shape", "reason": why}
        self.paired += 1
        alone = [not benchmark.finite, not target.finite]
        if any(alone):
            side = "both" if all(alone) else "benchmark" if alone[0] else "target"
            return {"status": "nonfinite", "reason": side}
        target, replica = farthest(benchmark, target)
        self.sketches[0, name] = benchmark.sketch.sum(axis=0), target.sketch.sum(axis=0)
        found = _error(benchmark, target)
        place = replica or one_rank(benchmark, target)
        if place is not None:
            self.places[name] = place
        differences = {
            f"{number}_diff": _minus(getattr(target, number), getattr(benchmark, number))
            for number in ("max", "min", "mean", "norm")
            if number != "norm" or (benchmark.counted and target.counted)
        }
        return {"status": "matched", "reason": JOINED, **differences, **found}

    def parameters(self, runs: Sequence[Run], stage: str) -> None:
        """Rows of the weights that modules ran with, whole; the gate judges them."""
        sides = [_parameters(run, stage, self._step) for run in runs]
        modules = {
            row["module"]: row
            for row in self._rows
            if row["direction"] == "forward" and row["status"] == "matched"
        }
        for name in sorted(sides[0].keys() & sides[1].keys()):
            module, _, index = name.rpartition(".")
            if module not in modules:
                continue
            of = modules[module]
            shards = [side[name] for side in sides]
            shapes = [list(own[0].part.shape) for own in shards]
            if shapes[0] != shapes[1]:
                continue
            record = f"Module.{module}.{of['op']}.forward.0.parameters.{index}"
            row = {
                **{key: of[key] for key in _SHARED},
                "order": _PER_CALL * self._order[module, "forward"] + 1,
                "name": record,
                "slot": "parameters",
                "index": index,
                "status": "matched",
                "reason": JOINED,
            }
            for side, own, shape in zip(("benchmark", "target"), shards, shapes, strict=True):
                row |= {
                    f"name_{side}": record, f"dtype_{side}": own[0].dtype, f"shape_{side}": shape,
                    f"norm_{side}": unshard.norm(own),
                }  # fmt: skip
            self._rows.append(row | _error_of_weights(*shards))

    def table(self, like: pl.DataFrame) -> pl.DataFrame:
        """The rows with the columns of a comparison."""
        return pl.DataFrame(self._rows, schema=like.schema, strict=False)

    def alone(self, side: str) -> tuple[str, ...]:
        """Modules that one side alone has."""
        have = [
            {row["module"] for row in self._rows if row.get(f"name_{name}")}
            for name in (side, "target" if side == "benchmark" else "benchmark")
        ]
        return tuple(sorted(have[0] - have[1]))

    def shared(self) -> int:
        """Records of modules that both sides have."""
        apart = {*self.alone("benchmark"), *self.alone("target"), *self._divided}
        own = (row for row in self._rows if row["slot"] != "parameters")
        return sum(row["module"] not in apart for row in own)


def _numbers(side: str, name: str, whole: Whole) -> dict[str, Any]:
    return {
        f"name_{side}": name, f"dtype_{side}": whole.dtype,
        f"shape_{side}": [whole.tokens, whole.width], f"max_{side}": whole.max,
        f"min_{side}": whole.min, f"mean_{side}": whole.mean, f"norm_{side}": whole.norm,
    }  # fmt: skip


def _unpaired(benchmark: Whole, target: Whole) -> str | None:
    """Why two records of one name are not compared."""
    if benchmark.width != target.width:
        return OTHER_WIDTH
    if not (benchmark.complete and target.complete):
        return INCOMPLETE
    same = (benchmark.tokens, benchmark.identity) == (target.tokens, target.identity)
    return None if same else OTHER_TOKENS


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _error(benchmark: Whole, target: Whole) -> dict[str, Any]:
    """Relative L2 difference; every stretch's sketch estimates its own share without bias."""
    scale = benchmark.norm or target.norm
    distance = float(np.linalg.norm(target.sketch - benchmark.sketch))
    error = distance / scale if scale else 0.0
    seen = error > DEVICES
    stretches = groups(benchmark.width)
    return {
        "error": error if seen else UNSEEN,
        "error_kind": "sketch",
        # as compare has it: what a sketch could not have seen is as uncertain as it is large
        "error_uncertainty": deviation(stretches * K) if seen else 1.0,
    }


def _parameters(run: Run, stage: str, step: int) -> dict[str, list[Parameter]]:
    table = run.weights()
    found: dict[str, list[Parameter]] = {}
    if table is None:
        return found
    here = table.filter((pl.col("stage") == stage) & (pl.col("step") == step))
    first = here.unique(["rank", "name"], keep="first", maintain_order=True)
    for shard in unshard.parameters(first):
        found.setdefault(shard.name, []).append(shard)
    return found


def _error_of_weights(
    benchmark: Sequence[Parameter], target: Sequence[Parameter]
) -> dict[str, Any]:
    sketches = [unshard.sketch(side) for side in (benchmark, target)]
    norm = unshard.norm(benchmark)
    if sketches[0] is None or sketches[1] is None or norm is None:
        return {}
    apart = distance(sketches[0], sketches[1])
    error = apart / norm if norm else math.inf if apart else 0.0
    seen = error > SHARDED
    return {
        "error": error if seen else UNSEEN,
        "error_kind": "sketch",
        "error_uncertainty": deviation() if seen else 1.0,
        "max_diff": 0.0, "min_diff": 0.0, "mean_diff": 0.0, "norm_diff": 0.0,
    }  # fmt: skip
