"""Weights at the start: every parameter is the same on both sides.

Equal layouts compare digests. Shards of other layouts are compared unsharded: by the sum of their
sketches where their places are known, else by norms, which cannot see everything and are said to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, opened, shut
from rlprobe.judge import sketched, unshard
from rlprobe.judge.unshard import Parameter
from rlprobe.said import Said, joined, listed, of_side, say
from rlprobe.sketch import distance
from rlprobe.sketch_floors import SHARDED

ITEM = "weights"
#: A sketch distance near sqrt(2) of the norm with equal norms: the same numbers, elsewhere.
_PERMUTED = 0.3
_SAME_NORM = 1e-6


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
            say(
                "no weights were digested by the {lacking}",
                lacking=joined(map(of_side, lacking), say(" and the ")),
            ),
            say(
                "run with capture.provenance on: a difference in weights would be blamed "
                "on a module"
            ),
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
            say("no stage has digested weights on both sides"),
            say("capture the same stages on both sides"),
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
            say(
                "{compared} parameters agree, {by_norm} of them by norm only (sharded "
                "differently, without sketches)",
                compared=compared,
                by_norm=by_norm,
            ),
            say("capture with sketches to compare shards element by element"),
        ), None
    return opened(
        ITEM,
        say(
            "{compared} parameters agree in {count} stages: {stages}",
            compared=compared,
            count=len(stages_seen),
            stages=listed(stages_seen, 6),
        ),
    ), None


@dataclass(frozen=True)
class _Difference:
    """How one parameter differs."""

    #: In words, after its name.
    what: Said
    #: Both sides' norms, where they are known.
    norms: tuple[float | None, float | None] = (None, None)
    #: The same numbers, elsewhere.
    permuted: bool = False


@dataclass
class _Result:
    """What was found of a stage's parameters."""

    compared: int = 0
    by_norm: int = 0
    #: Of how many: those that one side alone has are held against nothing, and differ.
    total: int = 0
    wrong: dict[str, _Difference] = field(default_factory=dict)


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
    result.total = len(names)
    for name in names:
        b, t = (side.get(name) for side in sides)
        if b is None or t is None:
            found: _Difference | None = _Difference(
                say("is on the {side} only", side=of_side("target" if b is None else "benchmark"))
            )
        else:
            result.compared += 1
            found = _parameter(b, t, result)
        if found is not None:
            result.wrong[name] = found
    return result


def _parameters(frame: pl.DataFrame) -> dict[str, list[Parameter]]:
    found: dict[str, list[Parameter]] = {}
    for shard in unshard.parameters(frame.sort("rank", maintain_order=True)):
        found.setdefault(shard.name, []).append(shard)
    return {name: _with_elements(shards) for name, shards in found.items()}


def _with_elements(shards: list[Parameter]) -> list[Parameter]:
    """Shards that hold anything: a parameter of fewer rows than ranks leaves some empty."""
    return [shard for shard in shards if 0 not in shard.part.local_shape] or shards[:1]


def _parameter(b: list[Parameter], t: list[Parameter], result: _Result) -> _Difference | None:
    """What is different about one parameter, None where nothing is."""
    shapes = [list(side[0].part.shape) for side in (b, t)]
    if shapes[0] != shapes[1]:
        return _Difference(
            say("has shape {benchmark} against {target}", benchmark=shapes[0], target=shapes[1])
        )
    layouts = [[(s.part.local_shape, s.part.offset) for s in side] for side in (b, t)]
    digests = [[shard.digest for shard in side] for side in (b, t)]
    known = all(digest is not None for side in digests for digest in side)
    dtypes = b[0].dtype == t[0].dtype
    if layouts[0] == layouts[1] and known and dtypes:
        return None if digests[0] == digests[1] else _how(b, t)
    # Another dtype rounds every weight once. Zeros (biases at the start) are exact.
    tolerance = SHARDED if dtypes else 2.0**-8
    sketches, norms = _together(b, t)
    if sketches[0] is not None and sketches[1] is not None and norms[0] is not None:
        return None if distance(sketches[0], sketches[1]) <= tolerance * norms[0] else _how(b, t)
    result.by_norm += 1
    if norms[0] is None or norms[1] is None:
        return _Difference(say("has neither digest nor norm on both sides"))
    off = abs(norms[1] - norms[0]) / norms[0] if norms[0] else abs(norms[1])
    return None if off <= tolerance else _how(b, t)


def _together(
    b: list[Parameter], t: list[Parameter]
) -> tuple[list[sketched.Vector | None], tuple[float | None, float | None]]:
    """Both sides' sketches and norms of the whole parameter."""
    return [unshard.sketch(side) for side in (b, t)], (unshard.norm(b), unshard.norm(t))


def _how(b: list[Parameter], t: list[Parameter]) -> _Difference:
    """How a parameter's values differ."""
    sketches, norms = _together(b, t)
    if not norms[0] or norms[1] is None:
        return _Difference(say("differs"), norms)
    ratio = norms[1] / norms[0]
    if sketches[0] is None or sketches[1] is None:
        said = say("differs; its norm is {ratio:.6g} times the benchmark's", ratio=ratio)
        return _Difference(said, norms)
    apart = distance(sketches[0], sketches[1]) / norms[0]
    if abs(ratio - 1.0) < _SAME_NORM and apart > _PERMUTED:
        said = say("has the same norm and other values: its elements are permuted")
        return _Difference(said, norms, permuted=True)
    return _Difference(say("differs by {distance:.2g} of its norm", distance=apart), norms)


def _different(stage: str, result: _Result) -> tuple[GateItem, Shut]:
    names = list(result.wrong)
    first = result.wrong[names[0]]
    said = say(
        "{stage}: {count} of {compared} parameters differ: {names}",
        stage=stage,
        count=len(names),
        compared=result.total,
        names=listed(names),
    )
    how = say("{name} {what}", name=names[0], what=first.what)
    if any(found.permuted for found in result.wrong.values()):
        action = say(
            "check the conversion of the checkpoint: fused or permuted heads (QKV), transposed or "
            "swapped weights"
        )
    else:
        action = say("load the same checkpoint on both sides; compare the conversion and the dtype")
    # One module's parameters point at it; everything at once points at what was loaded.
    modules = {name.rpartition(".")[0] for name in names}
    module = modules.pop() if len(modules) == 1 else None
    values = [{"parameter": names[0], "norm": norm} for norm in first.norms]
    return shut(ITEM, say("{said}. {how}", said=said, how=how), action), Shut(
        "weights", ITEM, stage, 0, module or None, None, values[0], values[1], [said, how]
    )
