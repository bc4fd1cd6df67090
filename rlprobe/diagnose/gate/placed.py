"""Which part of a parameter, or of its gradient, each process says that it has.

What is recorded of shards is added up by these places where the sides are laid out otherwise. Where
they are laid out alike it is not, so that nothing else looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.said import Said, listed, say
from rlprobe.store.manifest import Process
from rlprobe.store.read import Run

#: What says whose part it is; a model may enter a stage several times.
_PART = ["step", "stage", "rank", "name", "reading"]
_PLACE = ["role", "shape", "local_shape", "offset", "complete"]


def check(evidence: Evidence) -> list[Said]:
    """Processes that the two sides do not say the same of, or else parts that they do not; what
    models hold that are laid out otherwise lies elsewhere by intent."""
    if not is_alike(evidence):
        return _processes(*(run.manifest.layout for run in _runs(evidence)))
    weights = [_of_both(evidence, run.weights()) for run in _runs(evidence)]
    gradients = [_of_both(evidence, run.gradients()) for run in _runs(evidence)]
    return [
        *_elsewhere(weights, say("parts")),
        *_elsewhere(gradients, say("gradients")),
        *_alone(gradients),
    ]


def _processes(left: Sequence[Process], right: Sequence[Process]) -> list[Said]:
    sides = [{(one.role, one.rank): one for one in side} for side in (left, right)]
    lone = sorted(sides[0].keys() ^ sides[1].keys())
    found = [
        say("{role}, rank {rank} is on one side only", role=role, rank=rank) for role, rank in lone
    ]
    for role, rank in sides[0].keys() & sides[1].keys():
        mine, other = (vars(side[role, rank]) for side in sides)
        found += [
            say(
                "{role}, rank {rank} has {field} {benchmark} against {target}",
                role=role,
                rank=rank,
                field=field,
                benchmark=mine[field],
                target=other[field],
            )
            # back ends say of themselves what others do not
            for field in (mine if mine["backend"] == other["backend"] else ("backend",))
            if mine[field] != other[field]
        ]
    return [listed(sorted(found), 3)] if found else []


def copies(evidence: Evidence) -> list[Said]:
    """Parameters whose changes one side read off copies, or off copies of another format."""
    if not is_alike(evidence):
        return []
    left, right = (_of_both(evidence, run.gradients()) for run in _runs(evidence))
    if left is None or right is None:
        return []
    both = left.join(right, on=_PART, suffix="_target", maintain_order="left")
    odd = both.filter(pl.col("kept").ne_missing(pl.col("kept_target")))
    return _said(
        odd,
        say(
            "read off copies of another format: changes of {count:,} parameters",
            count=odd.height,
        ),
    )


def _runs(evidence: Evidence) -> tuple[Run, Run]:
    return evidence.benchmark, evidence.target


def is_alike(evidence: Evidence) -> bool:
    """Whether the same processes of the same back ends stand in the same places on both sides."""
    return evidence.benchmark.manifest.layout == evidence.target.manifest.layout


def _of_both(evidence: Evidence, table: pl.DataFrame | None) -> pl.DataFrame | None:
    """Of the steps and stages that both sides captured."""
    if table is None:
        return None
    runs = (evidence.benchmark, evidence.target)
    steps = set.intersection(*(set(run.manifest.steps) for run in runs))
    ran = [
        {name for name, one in run.manifest.stages.items() if one.state == "captured"}
        for run in runs
    ]
    here = table.filter(
        pl.col("step").is_in(sorted(steps)) & pl.col("stage").is_in(sorted(ran[0] & ran[1]))
    )
    return here.with_columns(reading=pl.int_range(pl.len()).over(_PART[:-1]))


def _elsewhere(sides: Sequence[pl.DataFrame | None], what: Said) -> list[Said]:
    left, right = sides
    if left is None or right is None:
        return []
    both = left.join(right, on=_PART, suffix="_target", maintain_order="left")
    other = pl.any_horizontal(pl.col(name).ne_missing(pl.col(f"{name}_target")) for name in _PLACE)
    odd = both.filter(other)
    return _said(odd, say("said to lie elsewhere: {what} of {count:,} parameters", what=what,
                          count=odd.height))  # fmt: skip


def _alone(tables: Sequence[pl.DataFrame | None]) -> list[Said]:
    """Gradients of which one side alone says where they lie: a back end says it of all or none."""
    known = [side for side in tables if side is not None]
    if not known:
        return []
    sides = [known[0].clear() if side is None else side for side in tables]
    lone = pl.concat(
        one.join(other, on=_PART, how="anti", maintain_order="left")
        for one, other in (sides, sides[::-1])
    )
    return _said(
        lone,
        say("placed on one side only: gradients of {count:,} parameters", count=lone.height),
    )


def _said(odd: pl.DataFrame, said: Said) -> list[Said]:
    if odd.is_empty():
        return []
    first = odd.row(0, named=True)
    return [
        say(
            "{said}, first {name} ({stage}, step {step}, rank {rank})",
            said=said,
            name=first["name"],
            stage=first["stage"],
            step=first["step"],
            rank=first["rank"],
        )
    ]
