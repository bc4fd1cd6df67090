"""Which tokens two sides sent to other experts, layer by layer.

A router's choice is joined by token (sample and position, :mod:`rlprobe.coordinates`), so that it
does not matter in which micro-batch, on which rank or in which order a side had it. A token counts
as routed otherwise where the set of its experts differs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec
import polars as pl

from rlprobe import stages
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, TARGET

if TYPE_CHECKING:
    from rlprobe.store.read import Run

Against = Literal["benchmark", "engine_benchmark", "engine_target"]
_ENGINES: tuple[Against, Against] = ("engine_benchmark", "engine_target")
_NUMBER = re.compile(r"\d+")


class Routed(msgspec.Struct, frozen=True):
    """One router of a stage on both sides."""

    stage: str
    step: int
    #: What was held against each other: the target against the ``benchmark``, or one side's
    #: training against the engine that it generates with.
    against: Against
    #: Hugging Face path of the router.
    module: str
    #: How many experts it chooses from.
    experts: int
    #: Tokens that both sides have, and those of them whose experts are not the same.
    tokens: int
    otherwise: int
    #: Choices (a token's, of one expert) that one side has and the other has not, of all choices.
    choices: int
    moved: int
    #: Whether tokens were sent to the benchmark's experts nevertheless (``routing: replay``); what
    #: is counted is then what each router would have chosen itself.
    replayed: bool = False

    @property
    def share(self) -> float:
        """Of the tokens, how many were routed otherwise."""
        return self.otherwise / self.tokens if self.tokens else 0.0


def routed(results: Results, step: int) -> list[Routed]:
    """Every router of every stage that both sides recorded, in the order of stages and layers.

    Raises:
        StoreError: a table is damaged.
    """
    runs = [results.run(role) for role in (BENCHMARK, TARGET)]
    if runs[0] is None or runs[1] is None:
        return []
    found: list[Routed] = []
    for stage in (*stages.TRAINING_STAGES, stages.FORCED):
        found += _joined(stage, step, "benchmark", *(_of(run, stage, step) for run in runs))
    if runs[1].manifest.declared.get("routing") == "replay":
        found = [msgspec.structs.replace(each, replayed=True) for each in found]
    trained = stages.LOG_PROB
    for against, run in zip(_ENGINES, runs, strict=True):
        engine = _of(run, stages.FORCED, step)
        found += _joined(trained, step, against, engine, _of(run, trained, step))
    return found


def of_stage(results: Results, stage: str, step: int) -> list[Routed]:
    """Every router of one stage that both sides recorded.

    Raises:
        StoreError: a table is damaged.
    """
    sides = (_of(results.run(role), stage, step) for role in (BENCHMARK, TARGET))
    return _joined(stage, step, "benchmark", *sides)


def lacking(results: Results, stage: str, step: int) -> dict[str, int]:
    """Routers of which one side alone has choices of some tokens, and how many.

    Where every router of an engine that was led through responses has some, that is no loss: what
    it has cached it does not run again.

    Raises:
        StoreError: a table is damaged.
    """
    left, right = (_of(results.run(role), stage, step) for role in (BENCHMARK, TARGET))
    if left is None or right is None:
        return {}
    keys = ["module", "token"]
    lone = pl.concat(
        [
            one.select(keys).join(other.select(keys), on=keys, how="anti", maintain_order="left")
            for one, other in ((left, right), (right, left))
        ]
    )
    counts = dict(lone.group_by("module", maintain_order=True).len().iter_rows())
    routers = {*left.get_column("module"), *right.get_column("module")}
    return {} if stage in stages.ENGINE_STAGES and len(counts) == len(routers) else counts


def sized_otherwise(results: Results, stage: str, step: int) -> list[str]:
    """Routers that do not choose from as many experts on both sides, or for each of their tokens.

    Raises:
        StoreError: a table is damaged.
    """
    sides = [_of(results.run(role), stage, step) for role in (BENCHMARK, TARGET)]
    if sides[0] is None or sides[1] is None:
        return []
    every = pl.concat([side.select("module", "experts") for side in sides if side is not None])
    sizes = every.group_by("module").agg(pl.col("experts").n_unique())
    return sorted(sizes.filter(pl.col("experts") > 1).get_column("module"))


def with_idle(results: Results, stage: str, step: int) -> list[str]:
    """Routers of which a side sent no token to some expert in a stage.

    Raises:
        StoreError: a table is damaged.
    """
    found: set[str] = set()
    for role in (BENCHMARK, TARGET):
        table = _of(results.run(role), stage, step)
        if table is not None:
            used = table.explode("chosen").filter(pl.col("chosen") >= 0)
            counts = used.group_by("module").agg(
                pl.col("chosen").n_unique(), pl.col("experts").max()
            )
            idle = counts.filter(pl.col("chosen") < pl.col("experts"))
            found.update(idle.get_column("module"))
    return sorted(found)


def _of(run: Run | None, stage: str, step: int) -> pl.DataFrame | None:
    """A side's choices, of each router and token one: ranks of one model repeat them."""
    table = None if run is None else run.routing(stage)
    if table is None:
        return None
    here = table.filter(pl.col("step") == step)
    return here.unique(["module", "token"], keep="first", maintain_order=True)


def _joined(
    stage: str,
    step: int,
    against: Against,
    left: pl.DataFrame | None,
    right: pl.DataFrame | None,
) -> list[Routed]:
    if left is None or right is None:
        return []
    columns = ["module", "token", "chosen"]
    both = left.select(*columns, "experts").join(right.select(columns), on=["module", "token"])
    own = pl.col("chosen").list.set_difference(pl.col("chosen_right"))
    other = pl.col("chosen_right").list.set_difference(pl.col("chosen"))
    moved = pl.max_horizontal(own.list.len(), other.list.len())
    table = (
        both.with_columns(moved=moved)
        .group_by("module")
        .agg(
            pl.col("experts").max(),
            tokens=pl.len(),
            otherwise=(pl.col("moved") > 0).sum(),
            choices=pl.col("chosen").list.len().sum(),
            moved=pl.col("moved").sum(),
        )
    )
    found = [Routed(stage, step, against, **row) for row in table.iter_rows(named=True)]
    return sorted(found, key=lambda each: _in_order(each.module))


def _in_order(module: str) -> tuple[list[int], str]:
    """Layers by their numbers."""
    return [int(number) for number in _NUMBER.findall(module)], module
