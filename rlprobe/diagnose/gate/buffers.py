"""Buffers: tables, masks and statistics that a model computes with and no optimizer steps.

A rotary table in another format is computed with from the first layer on, and what it makes may lie
below the floor of every single record: what can be read off is said, whatever the records say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, opened
from rlprobe.judge.logical import layout
from rlprobe.judge.roundoff import FP32, UNIT
from rlprobe.said import SEMICOLON, Said, joined, of_side, say
from rlprobe.sketch import distance

ITEM = "buffers"
#: Round-offs of fp32 by which a table may differ that two devices compute by themselves, and of its
#: own format, into which it is rounded once.
_COMPUTED, _STORED = 32.0, 2.0
#: How many are named.
_NAMED = 4

Row = dict[str, Any]
#: Rows of one buffer by rank.
Ranks = dict[int, Row]


def check(evidence: Evidence) -> GateItem | None:
    """Item ``buffers``: those of the same name and shape; None where neither side has any.

    A buffer that its own side changes from one entry to the next (running statistics) follows what
    was computed, and is held against the other side's at the first captured step alone.

    Raises:
        StoreError: a table of buffers is damaged.
    """
    tables = [run.buffers() for run in (evidence.benchmark, evidence.target)]
    if all(table is None for table in tables):
        return None
    known = [table for table in tables if table is not None]
    if len(known) == 1:
        return _lacking("benchmark" if tables[0] is None else "target")
    step = evidence.step.number
    first = min(min(table.get_column("step")) for table in known)
    moving = set() if step == first else set.union(*map(_moving, known))
    sides = [_of_step(table, step) for table in known]
    found: dict[str, list[_Apart]] = {}
    compared: set[str] = set()
    left, right = sides
    for key in left.keys() & right.keys():
        stage, role, name = key
        if (role, name) in moving:
            continue
        alike = layout.of_one_back_end(evidence.results, stage) or stage in stages.ENGINE_STAGES
        told = _apart(left[key], right[key], alike)
        if told is not _UNKNOWN:
            compared.add(name)
        if isinstance(told, _Apart):
            found.setdefault(name, []).append(told)
    if found:
        return _differing(found, len(compared))
    alone = {key[2] for key in left.keys() ^ right.keys()} - compared
    return opened(
        ITEM,
        say(
            "{count} buffers are the same on both sides; held against nothing: {alone} that one "
            "side alone has, {moving} that change while training",
            count=len(compared),
            alone=len(alone),
            moving=len(moving),
        ),
    )


@dataclass(frozen=True)
class _Apart:
    """How the two sides' differ."""

    stage: str
    rank: int
    formats: tuple[str, str]
    #: Relative to the benchmark's norm; None where only digests tell.
    error: float | None


#: What :func:`_apart` says of buffers that cannot be held against each other.
_UNKNOWN = object()


def _apart(left: Ranks, right: Ranks, alike: bool) -> Any:
    """How a buffer differs; None where it does not.

    Args:
        left: the benchmark's, right: the target's.
        alike: whether formats and whatever only digests tell must be the same too.
    """
    unknown = True
    for rank, t in sorted(right.items()):
        b = left.get(rank) or left[min(left)]
        if b["shape"] != t["shape"]:
            continue
        formats = (b["dtype"], t["dtype"])
        if b["digest"] == t["digest"] and formats[0] == formats[1]:
            unknown = False
            continue
        error = _error(b, t)
        if error is None and not alike:
            continue
        unknown = False
        units = [UNIT.get(one, 0.0) for one in formats]
        allowed = _COMPUTED * FP32 + _STORED * (min(units) if alike else max(units))
        if error is None or error > allowed or (alike and formats[0] != formats[1]):
            return _Apart(b["stage"], rank, formats, error)
    return _UNKNOWN if unknown else None


def _error(b: Row, t: Row) -> float | None:
    if b["sketch"] is None or t["sketch"] is None or len(b["sketch"]) != len(t["sketch"]):
        return None
    size = b["norm"] or t["norm"]
    return distance(b["sketch"], t["sketch"]) / size if size else 0.0


def _moving(table: pl.DataFrame) -> set[tuple[str, str]]:
    """Role and name of buffers that have other numbers at another entry of the same process."""
    counted = table.group_by("role", "rank", "name").agg(pl.col("digest").n_unique().alias("n"))
    moved = counted.filter(pl.col("n") > 1).select("role", "name").unique()
    return set(moved.iter_rows())


def _of_step(table: pl.DataFrame, step: int) -> dict[tuple[str, str, str], Ranks]:
    found: dict[tuple[str, str, str], Ranks] = {}
    for row in table.filter(pl.col("step") == step).iter_rows(named=True):
        ranks = found.setdefault((row["stage"], row["role"], row["name"]), {})
        ranks.setdefault(row["rank"], row)
    return found


def _lacking(side: str) -> GateItem:
    return caveat(
        ITEM,
        say("the {side} recorded no buffers", side=of_side(side)),
        say("make its run again with this version: a table in another format shows nowhere else"),
    )


def _differing(found: dict[str, list[_Apart]], compared: int) -> GateItem:
    said = list(_named(found))
    if len(found) > _NAMED:
        said.append(say("and {count} more", count=len(found) - _NAMED))
    return caveat(
        ITEM,
        say(
            "{count} of {compared} differ: {said}",
            count=len(found),
            compared=compared,
            said=joined(said, SEMICOLON),
        ),
        say("see what makes them on each side: a format, a base, a length, a device's own table"),
    )


def _named(found: dict[str, list[_Apart]]) -> Iterator[Said]:
    order = list(stages.STAGES)
    for name, every in sorted(found.items())[:_NAMED]:
        one = min(every, key=lambda apart: order.index(apart.stage))
        b, t = (text.removeprefix("torch.") for text in one.formats)
        if one.error is None:
            yield say(
                "{name} ({stage}, rank {rank}: {benchmark} and {target}) by its digest",
                name=name, stage=one.stage, rank=one.rank, benchmark=b, target=t,
            )  # fmt: skip
        else:
            yield say(
                "{name} ({stage}, rank {rank}: {benchmark} and {target}) by {error:.2g} of it",
                name=name, stage=one.stage, rank=one.rank, benchmark=b, target=t, error=one.error,
            )  # fmt: skip
