"""Kinds of differences that hypotheses are fitted to: both sides' numbers, and their floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.diagnose.cause import repeated
from rlprobe.judge import execution
from rlprobe.judge.analysis import Finding
from rlprobe.judge.fits import Pair
from rlprobe.judge.row import Row, each
from rlprobe.said import Said, exactly, say

Array = npt.NDArray[np.float64]


OUTPUT, _INPUT = say("output"), say("input")


def slot(row: Row) -> Said:
    """What of a call a record is, in a sentence."""
    name = str(row["slot"])
    return {"output": OUTPUT, "input": _INPUT}.get(name, exactly(name))


@dataclass(frozen=True)
class Record:
    """Statistics of one record: rows of the judged table, which hold both sides and the floor.

    A law of it holds in every micro-batch where the record differs.
    """

    row: Row
    every: Sequence[Row]
    #: Whether it was made within a module, its inputs agreeing, so that a cut is one of its own.
    inside: bool = True
    #: The same call's records of the same slot, the row among them.
    siblings: Sequence[Row] = ()
    #: How the record is named in evidence.
    what: Said = OUTPUT

    @classmethod
    def of(cls, finding: Finding, row: Row, *, inside: bool = True, what: Said = OUTPUT) -> Record:
        """The record of a row of the finding's stage."""
        return cls(row, repeated.rows(finding, row), inside, siblings(finding, row), what)


@dataclass(frozen=True)
class Probabilities:
    """An attention's probabilities, [samples, heads, queries, keys], of one micro-batch."""

    row: Row


@dataclass(frozen=True)
class Tokens:
    """A result of one number a token, joined by sample, of logits that agree or are not known."""

    name: str
    pairs: Sequence[tuple[str, Array, Array]]
    #: Relative L2 difference that noise explains.
    floor: float
    #: Entropies of the same tokens: the benchmark's, and the target's where they are known.
    entropies: Sequence[tuple[Array, Array | None]] | None = None
    #: The samples' values that have entropies, in the same order.
    with_entropies: Sequence[Pair] = ()
    logits_agree: bool = True
    #: Whether entropies of this very computation are measured.
    measured: bool = False
    #: Ids of the tokens that the values may be of, by sample, in each way of lining them up.
    ids: Sequence[Sequence[Array]] = ()

    @property
    def values(self) -> list[Pair]:
        """Both sides' values by sample."""
        return [(b, t) for _, b, t in self.pairs]


@dataclass(frozen=True)
class Margins:
    """By how much an engine's likeliest token leads, where both sides choose the same."""

    #: Log-prob of the likeliest token less that of the second, of all tokens of a phase.
    benchmark: Array
    target: Array
    #: Root mean square difference of a log-prob that noise explains, in nats.
    noise: float


@dataclass(frozen=True)
class Parameters:
    """Gradients of many parameters: the rows that differ, statistics of both sides."""

    rows: pl.DataFrame
    #: Kind of :mod:`rlprobe.judge.origin`.
    kind: str
    world_size: int = 1
    #: Gradients of the first micro-batch were judged and agree.
    first_agrees: bool = False
    #: Each process's own gradients of all micro-batches were judged and agree.
    own_agree: bool = False
    #: They part after the first micro-batch and before they are clipped.
    later: bool = False
    #: Smallest and largest of the ranks' factors, where each has one of its own.
    of_ranks: tuple[float, float] | None = None
    #: Exponent of the error's growth over micro-batches.
    growth: float | None = None
    #: Floors of the gradients of the same slot that were judged and agree.
    agreeing: tuple[float, ...] = ()

    def spared(self, by: float) -> int:
        """How many of the gradients beside them a factor would have shown in, and does not."""
        return sum(2.0 * floor < abs(by - 1.0) for floor in self.agreeing)


@dataclass(frozen=True)
class Changes:
    """Changes of parameters whose gradients agree: the rows that differ, of how many.

    All of one update, the first that differs.
    """

    rows: pl.DataFrame
    total: int
    #: Parameters that changed on the benchmark alone.
    unmoved: int
    #: That update's number; None where a stage has one alone.
    update: int | None = None


@dataclass(frozen=True)
class Fact:
    """Something that differs and is a cause by what it is; nothing is fitted."""

    cause: str
    said: tuple[Said, ...]


@dataclass(frozen=True)
class Tensors:
    """A record's elements on both sides, [tokens, channels] in float64, finite."""

    benchmark: Array
    target: Array
    #: Relative L2 difference that noise explains; None where it is not known.
    floor: float | None = None
    #: Largest element, for what is equal within round-off.
    scale: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", float(np.abs(self.benchmark).max(initial=0.0)))

    @property
    def difference(self) -> Array:
        """Target less benchmark."""
        found: Array = self.target - self.benchmark
        return found

    def left(self, model: Array) -> float:
        """Relative L2 error that a model of the target leaves."""
        size = float(np.linalg.norm(self.benchmark))
        return float(np.linalg.norm(self.target - model)) / size if size else 0.0


def siblings(finding: Finding, row: Row) -> list[Row]:
    """The records of the same call, slot and rank, in every index; the row alone where unknown."""
    table = finding.stage.rows
    if not {"call_id", "phase", "slot"} <= set(table.columns) or row.get("call_id") is None:
        return [row]
    found = table.filter(
        (pl.col("call_id") == row["call_id"])
        & pl.col("rank").eq_missing(pl.lit(row.get("rank"), table.schema["rank"]))
        & (pl.col("phase") == row.get("phase", execution.FORWARD))
        & (pl.col("slot") == row.get("slot"))
        & pl.col("error").is_not_null()
    )
    return each(found) or [row]
