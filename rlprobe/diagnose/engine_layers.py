"""Layer by layer, where a run's engine and its training part: by sketches of tokens.

The engine's first pass of each sample against training's of the same tokens, block by block, held
against what round-off allows (:mod:`rlprobe.judge.engine`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from rlprobe import stages
from rlprobe.compare.match import rules
from rlprobe.compare.traininfer import sketched
from rlprobe.judge import engine
from rlprobe.judge.roundoff import UNIT
from rlprobe.store.read import Run

_FORMATS = {"fp64": "torch.float64", "fp32": "torch.float32", "bf16": "torch.bfloat16",
            "fp16": "torch.float16"}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A block's output in engine and training."""

    module: str
    tokens: int
    #: Relative L2 differences of a token.
    median: float
    largest: float
    #: What round-off allows of the median; None where the precision is not known.
    allowed: float | None

    @property
    def parts(self) -> bool:
        """Whether the two part by here."""
        return self.allowed is not None and not self.median <= self.allowed


@dataclass(frozen=True)
class Router:
    """A router's choices in engine and training."""

    module: str
    tokens: int
    #: Tokens that are sent to other experts.
    otherwise: int


@dataclass(frozen=True)
class Layers:
    """Blocks and routers in the model's order; empty where tokens were not sketched on both."""

    blocks: list[Block]
    routers: list[Router]

    @property
    def begins(self) -> Block | None:
        """The first block by which the two part."""
        return next((block for block in self.blocks if block.parts), None)

    @property
    def routed(self) -> tuple[int, int] | None:
        """Choices of experts that are others, of how many; None without routers."""
        if not self.routers:
            return None
        return sum(r.otherwise for r in self.routers), sum(r.tokens for r in self.routers)


def layers(run: Run) -> dict[int, Layers]:
    """How a run's engine and its training stand to each other, layer by layer, at each step.

    Of an engine that was led through responses its prefills, else its prompts before generating.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    for stage in reversed(stages.ENGINE_STAGES):
        found = sketched.compare(run.path, rules.load(), stage)
        if found is not None and found.table.height:
            return {
                int(step): Layers(
                    list(_blocks(found.table.filter(step=step), _unit(run))),
                    list(_routers(found.choices.filter(step=step))),
                )
                for step in found.table.get_column("step").unique().sort()
            }
    return {}


def _routers(table: pl.DataFrame) -> Iterator[Router]:
    grouped = (
        table.with_columns(module=_module())
        .group_by("module", maintain_order=True)
        .agg(pl.len(), otherwise=(pl.col("error") > 0).sum())
    )
    for name, count, otherwise in grouped.iter_rows():
        yield Router(name, count, otherwise)


def _unit(run: Run) -> float | None:
    return UNIT.get(_FORMATS.get(str(run.manifest.declared.get("precision")), ""))


def _module() -> pl.Expr:
    """The module of a record, by its name."""
    called = pl.col("name").str.replace(r"\.forward\..*$", "").str.replace(r"^Module\.", "")
    return called.str.replace(r"\.[^.]*$", "")


def _blocks(table: pl.DataFrame, unit: float | None) -> Iterator[Block]:
    grouped = (
        table.with_columns(module=_module())
        .group_by("module")
        .agg(
            pl.len(),
            pl.col("order").min(),
            median=pl.col("error").median(),
            largest=pl.col("error").max(),
        )
        .sort("order")
    )
    for name, count, order, median, largest in grouped.iter_rows():
        allowed = None if unit is None else engine.allowed(unit, order)
        yield Block(name, count, float(median), float(largest), allowed)
