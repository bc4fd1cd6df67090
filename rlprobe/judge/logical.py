"""One record per module and stage, where the sides are laid out otherwise.

Micro-batches of other sizes, ranks that share samples out otherwise, packed rows against padded
ones, tensor- and pipeline-parallel shards, FSDP against Megatron: record against record nothing can
be compared. Records by coordinates (:mod:`rlprobe.coordinates`) are the same in every layout. Here
those of all ranks of a side are added up to the whole tensor, and a row of each stands in place of
the rows of single calls, as if the whole stage had been one call of one process.

Ranks that hold the same tokens and features are replicas and count once: of several that differ,
the one that is farthest from the benchmark is judged, so that a fault of one replica alone is seen.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.coordinates import GROUPS, groups
from rlprobe.judge import execution, reasons, replicas, sketched, unshard
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.inputs import Results
from rlprobe.judge.unshard import Parameter
from rlprobe.logical import fused
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import Said, say
from rlprobe.sketch import K, deviation, distance
from rlprobe.sketch_floors import DEVICES, SHARDED, UNSEEN

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: (module, direction, slot).
_Key = tuple[str, str, str]
_Sketch = npt.NDArray[np.float64]

OTHER_TOKENS = "the sides' records are of other tokens"
OTHER_WIDTH = "of another width on the other side"
INCOMPLETE = "not all shards were recorded"
#: A difference that is this many times larger in the stretches of one rank is that rank's.
_ONE_RANK = 10.0


@dataclass(frozen=True)
class Part:
    """What one rank has of a logical record."""

    rank: int
    #: What ranks with the same tokens have in common.
    group: str
    first: int
    features: int
    sketch: _Sketch
    squares: float
    sum: float
    max: float
    min: float
    count: int


@dataclass(frozen=True)
class Whole:
    """A logical record of one side."""

    op: str
    dtype: str
    width: int
    tokens: int
    identity: int
    sketch: _Sketch
    norm: float
    max: float | None
    min: float | None
    mean: float | None
    #: Whether the norm is that of the elements, and not estimated from the sketch.
    counted: bool
    #: The ranks that hold it, with their features.
    parts: tuple[Part, ...]
    #: Every replica's part where there are several of one.
    replicas: tuple[Part, ...] = ()
    complete: bool = True

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.sketch).all()) and math.isfinite(self.norm)


@dataclass(frozen=True)
class Place:
    """The one rank of the target that has a record otherwise."""

    rank: int
    #: Which part of it, in words.
    said: Said


@dataclass(frozen=True)
class Joined:
    """Rows of a stage of which those of single calls are replaced."""

    rows: pl.DataFrame
    sketches: sketched.Joined = field(default_factory=dict)
    #: Rank and slice of a record that one rank alone has otherwise, by record name.
    places: Mapping[str, Place] = field(default_factory=dict)
    #: Where a record's first call stands among the benchmark's, by record name.
    orders: Mapping[str, int] = field(default_factory=dict)
    #: Records of modules that both sides have, and how many of them have a partner.
    shared: int = 0
    paired: int = 0
    #: Of the shared ones, those that are of other tokens on the other side.
    strange: int = 0
    #: Modules that one side alone has, by side.
    alone: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def unlike(results: Results, stage: str) -> Said | None:
    """How models are laid out otherwise; None where they are not, or nothing says it."""
    found = []
    for role in (BENCHMARK, TARGET):
        run = results.run(role)
        own = [] if run is None else replicas.processes(run, stage)
        if not own:
            return None
        found.append(own[0])
    left, right = (_layout(one) for one in found)
    if left == right:
        return None
    return say(
        "models are divided otherwise ({benchmark} against {target})",
        benchmark=_described(left),
        target=_described(right),
    )


def _layout(process: Any) -> tuple[Any, ...]:
    megatron = "megatron" in (process.backend or "").lower() or process.chunks is not None
    return (
        "Megatron" if megatron else "undivided",
        process.tp, process.pp, process.cp, process.ep, process.chunks or 1,
    )  # fmt: skip


def _described(layout: Sequence[Any]) -> str:
    names = ("TP", "PP", "CP", "EP")
    sizes = [f"{name} {size}" for name, size in zip(names, layout[1:5], strict=True) if size > 1]
    kind = "FSDP or one process" if layout[0] == "undivided" else str(layout[0])
    return " ".join([kind, *sizes])


def available(results: Results, stage: str, step: int) -> bool:
    """Whether both sides have records by coordinates of a stage and step."""
    for role in (BENCHMARK, TARGET):
        run = results.run(role)
        table = None if run is None else run.logical(stage)
        if table is None or table.filter(pl.col("step") == step).is_empty():
            return False
    return True


def joined(rows: pl.DataFrame, results: Results, stage: str, step: int) -> Joined:
    """Let one row stand for all calls of a module in a stage.

    Args:
        rows: columns of compare's records.parquet, of one stage and step, all ranks; what depends
            on micro-batches and shards is replaced.
        results: where both runs are found, with records by coordinates.
        stage: canonical name.
        step: captured step, from 0.

    Raises:
        StoreError: a table is damaged.
    """
    runs = [run for role in (BENCHMARK, TARGET) if (run := results.run(role)) is not None]
    sides = [_wholes(run, stage, step) for run in runs]
    _sum_parts(sides)
    factor = _scale(sides, [_data_parallel(run, stage) for run in runs])
    sides[1] = {key: _scaled(key, whole, factor) for key, whole in sides[1].items()}
    order = _order(runs, stage, step, sides)
    built = _Rows(step, order)
    for key in sorted({*sides[0], *sides[1]}, key=lambda key: order[key[:2]]):
        built.add(key, sides[0].get(key), sides[1].get(key))
    built.parameters(runs, stage)
    alone = {side: built.alone(side) for side in ("benchmark", "target")}
    # losses of all micro-batches are of the one pass that the stage is taken for
    kept = rows.filter(~_of_calls()).with_columns(
        call=pl.when(pl.col("slot") == "loss")
        .then(pl.lit(0, rows.schema["call"]))
        .otherwise("call")
    )
    table = pl.concat([built.table(rows), kept])
    return Joined(
        table.sort("rank", "order", maintain_order=True),
        built.sketches,
        built.places,
        _first_calls(rows, built.names),
        built.shared(),
        built.paired,
        built.strange,
        alone,
    )


def _first_calls(rows: pl.DataFrame, names: Mapping[tuple[str, str, str], str]) -> dict[str, int]:
    """The place of each record's first call in the benchmark's execution order."""
    own = rows.filter(_of_calls() & pl.col("name_benchmark").is_not_null())
    first = own.group_by("module", "direction", "slot").agg(pl.col("order").min())
    return {
        names[module, direction, slot]: order
        for module, direction, slot, order in first.iter_rows()
        if (module, direction, slot) in names and order is not None
    }


def excuses(joined: Joined) -> list[Excuse]:
    """Leave out what is of modules that one side's model has not, and updates of other samples."""
    modules = [module for own in joined.alone.values() for module in own]
    lone = pl.col("status").is_in(["benchmark_only", "target_only"])
    found = [Excuse(reasons.OTHER_MODULES, pl.col("module").is_in(modules) & lone)]
    if joined.strange and not joined.paired:
        # an update of other samples has other gradients
        found.append(Excuse(reasons.OTHER_PLACES, pl.col("phase") >= execution.LOSS))
    return found


def _of_calls() -> pl.Expr:
    """Rows of single calls of modules, forward and backward; losses are of the update."""
    calls = pl.col("direction").is_in(["forward", "backward"]) & (pl.col("slot") != "loss")
    return calls.fill_null(False)


def _wholes(run: Run, stage: str, step: int) -> dict[_Key, Whole]:
    table = run.logical(stage)
    assert table is not None
    ranks = {process.rank: process.dp_rank for process in replicas.processes(run, stage)}
    found: dict[_Key, list[dict[str, Any]]] = {}
    for row in table.filter(pl.col("step") == step).iter_rows(named=True):
        found.setdefault((row["module"], row["direction"], row["slot"]), []).append(row)
    return {key: _whole(own, ranks) for key, own in found.items()}


def _whole(rows: Sequence[Mapping[str, Any]], data_ranks: Mapping[int, int | None]) -> Whole:
    """The sum of all ranks' parts: over features within a data-parallel rank, then over these."""
    width = rows[0]["width"]
    by_tokens: dict[str, dict[int, list[Part]]] = {}
    tokens: dict[str, tuple[int, int]] = {}
    for row in rows:
        own = data_ranks.get(row["rank"])
        where = row["identity"] if own is None else f"data-parallel rank {own}"
        tokens[where] = row["tokens"], int(row["identity"], 16)
        by_tokens.setdefault(where, {}).setdefault(row["first"], []).append(_part(row, where))
    parts = [own[0] for each in by_tokens.values() for own in each.values()]
    replicas = [p for each in by_tokens.values() for own in each.values() if own[1:] for p in own]
    complete = all(
        sum(own[0].features for own in each.values()) == width for each in by_tokens.values()
    ) and all(row["width"] == width for row in rows)
    count = sum(part.count for part in parts)
    return Whole(
        rows[0]["op"],
        rows[0]["dtype"],
        width,
        sum(n for n, _ in tokens.values()),
        sum(identity for _, identity in tokens.values()) % (1 << 64),
        np.sum([part.sketch for part in parts], axis=0),
        math.sqrt(max(0.0, sum(part.squares for part in parts))),
        max(part.max for part in parts),
        min(part.min for part in parts),
        sum(part.sum for part in parts) / max(count, 1),
        True,
        tuple(parts),
        tuple(replicas),
        complete,
    )


def _part(row: Mapping[str, Any], group: str) -> Part:
    return Part(
        row["rank"],
        group,
        row["first"],
        row["features"],
        np.asarray(row["sketch"], np.float64).reshape(GROUPS, K),
        row["squares"],
        row["sum"],
        row["max"],
        row["min"],
        row["count"],
    )


def _sum_parts(sides: list[dict[_Key, Whole]]) -> None:
    """What parts send back to their common input, added up where the other side has the sum."""
    for mine, other in (sides, sides[::-1]):
        for key in [key for key in other if key not in mine]:
            module, direction, slot = key
            stem, _, name = module.rpartition(".")
            if (direction, slot) != ("backward", "output") or name not in fused.PARTS:
                continue
            parts = [mine.get((f"{stem}.{part}", *key[1:])) for part in fused.PARTS[name]]
            held = [part for part in parts if part is not None]
            if len(held) < len(parts):
                continue
            mine[key] = _added(held)
            for part in fused.PARTS[name]:
                del mine[f"{stem}.{part}", direction, slot]


def _added(parts: Sequence[Whole]) -> Whole:
    """The sum of tensors of one shape, of which the sketch alone is known."""
    sketch = np.sum([part.sketch for part in parts], axis=0)
    first = parts[0]
    return Whole(
        first.op, first.dtype, first.width, first.tokens, first.identity, sketch,
        float(np.linalg.norm(sketch)), None, None, None, False, first.parts, (),
        all(part.complete for part in parts),
    )  # fmt: skip


def _data_parallel(run: Run, stage: str) -> int:
    own = replicas.processes(run, stage)
    return max((process.dp for process in own), default=1)


def _scale(sides: Sequence[Mapping[_Key, Whole]], sizes: Sequence[int]) -> float:
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


def _scaled(key: _Key, whole: Whole, factor: float) -> Whole:
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


def _order(
    runs: Sequence[Run], stage: str, step: int, sides: Sequence[Mapping[_Key, Whole]]
) -> dict[tuple[str, str], int]:
    """The order in which modules' calls are complete, forward and then backward.

    That of a side whose every rank has them all; where ranks have different layers, these follow
    each other by number, and a rank's own order counts within them.
    """
    orders = [_calls(run, stage, step) for run in runs]
    known, apart = min(orders, key=lambda found: (found[1], -len(found[0])))
    last = len(known) + 1

    def position(call: tuple[str, str]) -> tuple[Any, ...]:
        module, direction = call
        backward = direction == "backward"
        rank, sequence = known.get(call, (last, last))
        place = _place(module) if apart else 0.0
        return backward, -place if backward else place, rank, sequence, module

    wanted = dict.fromkeys(key[:2] for side in sides for key in side)
    return {call: at for at, call in enumerate(sorted(wanted, key=position))}


def _calls(run: Run, stage: str, step: int) -> tuple[dict[tuple[str, str], tuple[int, int]], bool]:
    """By module and direction its first rank and place there; and whether ranks' modules differ."""
    table = run.logical(stage)
    assert table is not None
    here = table.filter(pl.col("step") == step).sort("rank", maintain_order=True)
    found: dict[tuple[str, str], tuple[int, int]] = {}
    ranks: dict[int, set[str]] = {}
    columns = ("rank", "module", "direction", "sequence")
    for rank, module, direction, sequence in here.select(columns).iter_rows():
        found.setdefault((module, direction), (rank, sequence))
        ranks.setdefault(rank, set()).add(module)
    return found, len({frozenset(held) for held in ranks.values()}) > 1


_LAYER = re.compile(r"\.layers\.(\d+)(\.|$)")
_BEFORE = re.compile(r"\b(embed_tokens|embedding|rotary_emb)$")


def _place(module: str) -> float:
    """Before the layers, the layer's number, or behind them."""
    layer = _LAYER.search(module)
    if layer is not None:
        return float(layer[1])
    return -1.0 if _BEFORE.search(module) else math.inf


class _Rows:
    """Rows of a comparison, one a logical record, as they are built.

    Args:
        step: captured step.
        order: of modules' calls.
    """

    def __init__(self, step: int, order: Mapping[tuple[str, str], int]) -> None:
        self._step = step
        self._order = order
        self._rows: list[dict[str, Any]] = []
        self.sketches: dict[tuple[int, str], tuple[_Sketch, _Sketch]] = {}
        self.places: dict[str, Place] = {}
        self.names: dict[_Key, str] = {}
        self.paired = self.strange = 0

    def add(self, key: _Key, benchmark: Whole | None, target: Whole | None) -> None:
        """The row of a record; a side that lacks it is None."""
        module, direction, slot = key
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
        target, replica = _farthest(benchmark, target)
        self.sketches[0, name] = benchmark.sketch.sum(axis=0), target.sketch.sum(axis=0)
        found = _error(benchmark, target)
        place = replica or _one_rank(benchmark, target)
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
        for name in sides[0].keys() & sides[1].keys():
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
        apart = {*self.alone("benchmark"), *self.alone("target")}
        own = (row for row in self._rows if row["slot"] != "parameters")
        return sum(row["module"] not in apart for row in own)


_PER_CALL = 4
#: Slots of a call in the order in which a dump has them; parameters come between.
_SLOTS = (
    ("forward", "input"), ("backward", "input"), ("forward", "output"), ("backward", "output"),
)  # fmt: skip
_SHARED = ("step", "rank", "rank_benchmark", "rank_target", "module", "op", "call", "direction")
JOINED = "all calls of the stage, by sample, position and feature"


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


def _farthest(benchmark: Whole, target: Whole) -> tuple[Whole, Place | None]:
    """The target with that replica in it that differs most, and which rank's it is.

    None for the rank where replicas are equal up to round-off of their sketches.
    """
    found: tuple[float, Whole, Part] | None = None
    for part in target.replicas:
        counted = next(
            own for own in target.parts if (own.group, own.first) == (part.group, part.first)
        )
        other = dataclasses.replace(target, sketch=target.sketch - counted.sketch + part.sketch)
        distance = float(np.linalg.norm(other.sketch - benchmark.sketch))
        if found is None or distance > found[0]:
            found = distance, other, part
    own = float(np.linalg.norm(target.sketch - benchmark.sketch))
    if found is None or found[0] <= own * _ONE_RANK:
        return target, None
    return found[1], Place(
        found[2].rank,
        say("of the ranks that hold the same, rank {rank} differs", rank=found[2].rank),
    )


def _one_rank(benchmark: Whole, target: Whole) -> Place | None:
    """The rank whose features alone differ, where ranks have different ones."""
    stretches = groups(target.width)
    if stretches == 1:
        return None
    apart = np.sum((target.sketch - benchmark.sketch) ** 2, axis=1)
    held: dict[tuple[int, int], list[int]] = {}
    for part in target.parts:
        held.setdefault((part.first, part.features), []).append(part.rank)
    each = target.width // stretches
    if len(held) < 2 or any(first % each or count % each for first, count in held):
        return None
    errors = {
        (first, count): float(apart[first // each : (first + count) // each].sum())
        for first, count in held
    }
    worst = max(errors, key=lambda at: errors[at])
    rest = max(error for at, error in errors.items() if at != worst)
    if len(held[worst]) > 1 or errors[worst] <= rest * _ONE_RANK**2:
        return None
    first, count = worst
    rank = held[worst][0]
    return Place(
        rank,
        say(
            "only features {first} to {last} of {width} differ, which rank {rank} has",
            first=first,
            last=first + count - 1,
            width=target.width,
            rank=rank,
        ),
    )


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
