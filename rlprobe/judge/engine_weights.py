"""The weights that an engine generates with, against those that its trainer has at that step.

An engine has a copy: weights are sent to it after every update, and once more when it wakes. Each
captured step digests both under training's names (:mod:`rlprobe.capture.engine_parameters`), so
that a copy that was not sent, was sent in part, was cut or placed otherwise, or was rounded on the
way is seen whatever it does to the numbers. The comparison is within one run: the other device has
no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from rlprobe import stages
from rlprobe.judge import unshard
from rlprobe.judge.unshard import Parameter
from rlprobe.said import Said, listed, say
from rlprobe.sketch import distance
from rlprobe.sketch_floors import SHARDED

if TYPE_CHECKING:
    from rlprobe.store.read import Run

STALE, HALF, SPLIT, ROUNDED, OTHER = "stale", "half", "split", "rounded", "other"
_NAMED = 4
#: Stages in which the trainer has the weights that it sent, the first that was captured.
_TRAINER = (stages.LOG_PROB, stages.ACTOR_UPDATE)
#: Of parameters of PEFT's adapters, behind the module that each belongs to.
_ADAPTER = ".lora_"
#: A shorter format's mantissa, in explicit bits. Rounding to nearest leaves a relative L2
#: difference of 0.2 / 2**bits: a unit in the last place over the square root of 12, of significands
#: that are spread evenly by their logarithm.
_BITS = {"bfloat16": 7, "float16": 10, "float8_e4m3": 3, "float8_e5m2": 2}
_ROUNDING = 0.196
#: Factor within which a distance of two sketches, which is an estimate, may be off.
_ABOUT = 1.5
#: Equal norms, and a distance of two sketches of unrelated numbers of those norms.
_SAME_NORM, _ELSEWHERE = 1e-5, 0.3
#: Digests that differ are a difference, however little sketches show of it.
_DIGESTS = 2 * SHARDED
#: What an engine may keep of a trainer's weights that are stored wider: each rounded once.
_KEPT = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11}
_FLOATS = frozenset({"torch.float64", "torch.float32", *_KEPT})


@dataclass(frozen=True)
class Wrong:
    """A weight of the engine that is not the trainer's."""

    name: str
    #: Relative difference; None where it is not known.
    apart: float | None
    #: It is the trainer's of the captured step before.
    earlier: bool
    #: Its numbers are the trainer's, at other places.
    elsewhere: bool
    #: The format that rounding to would leave such a difference; None where none would.
    rounded: str | None


@dataclass(frozen=True)
class Sync:
    """How an engine's weights stand to the trainer's at one step."""

    step: int
    #: Weights held against the trainer's.
    compared: int
    #: Without a counterpart in the trainer, or an adapter's in the engine, or without numbers.
    left: tuple[str, ...]
    #: In the trainer's order.
    wrong: tuple[Wrong, ...]
    #: Weights that the trainer has changed since the captured step before; None: it is the first.
    moved: int | None

    @property
    def kind(self) -> str | None:
        """What happened to them, as far as it is the same for all; None where nothing did."""
        if not self.wrong:
            return None
        if all(one.earlier for one in self.wrong):
            return STALE if len(self.wrong) == self.moved else HALF
        if all(one.elsewhere for one in self.wrong):
            return SPLIT
        formats = {one.rounded for one in self.wrong}
        return ROUNDED if len(formats) == 1 and None not in formats else OTHER


def of_run(run: Run) -> list[Sync]:
    """Every captured step of a run whose engine's and trainer's weights were digested.

    Raises:
        StoreError: the table of weights is damaged.
    """
    table = run.weights()
    return [] if table is None else list(steps(table))


def steps(table: pl.DataFrame) -> Iterator[Sync]:
    """Likewise, of a table of weights (columns: ``parts.WEIGHTS``)."""
    before: Mapping[str, list[Parameter]] | None = None
    for step in table.get_column("step").unique().sort():
        here = table.filter(step=step)
        trainer = _held(here, _TRAINER)
        # an engine that was led through responses has one set of weights for both
        engine = _held(here, stages.ENGINE_STAGES)
        if trainer and engine:
            yield _sync(int(step), engine, trainer, before)
        before = trainer or before


def _held(table: pl.DataFrame, among: tuple[str, ...]) -> dict[str, list[Parameter]]:
    """Shards by name, of the first of some stages that is there."""
    stage = next((s for s in among if table.filter(stage=s).height), None)
    if stage is None:
        return {}
    rows = table.filter(stage=stage)
    first = rows.unique(["role", "rank", "name"], keep="first", maintain_order=True)
    found: dict[str, list[Parameter]] = {}
    for shard in unshard.parameters(first.sort("rank", maintain_order=True)):
        if 0 not in shard.part.local_shape:
            found.setdefault(shard.name, []).append(shard)
    return found


def _sync(
    step: int,
    engine: Mapping[str, list[Parameter]],
    trainer: Mapping[str, list[Parameter]],
    before: Mapping[str, list[Parameter]] | None,
) -> Sync:
    wrong, left, compared = [], [name for name in engine if name not in trainer], 0
    # an engine's copy of what has an adapter may have it merged into it, or apart
    adapted, apart_there = (
        {name.partition(_ADAPTER)[0] for name in side if _ADAPTER in name}
        for side in (trainer, engine)
    )
    if apart_there:
        left += [name for name in trainer if _ADAPTER in name and name not in engine]
    adapted -= apart_there
    for name in (name for name in trainer if name in engine):
        if name.rpartition(".")[0] in adapted:
            left.append(name)
            continue
        found = [(_apart(trainer[name], copy), copy) for copy in _copies(engine[name])]
        measured = [(apart, copy) for apart, copy in found if apart is not None]
        if len(measured) < len(found):
            left.append(name)
            continue
        compared += 1
        apart, copy = max(measured, key=lambda pair: pair[0])
        if apart > _allowed(trainer[name], copy):
            wrong.append(_wrong(name, apart, trainer[name], copy, (before or {}).get(name)))
    moved = None
    if before is not None:
        known = [name for name in trainer if name in engine and name in before]
        moved = sum(_differ(before[name], trainer[name]) for name in known)
    return Sync(step, compared, tuple(left), tuple(wrong), moved)


def _copies(shards: list[Parameter]) -> list[list[Parameter]]:
    """The different wholes that several replicas of an engine may have; one where all agree."""
    contents: dict[tuple[tuple[int, ...], str | None], dict[str | None, Parameter]] = {}
    for shard in shards:
        place = shard.part.local_shape, shard.part.offset
        contents.setdefault(place, {}).setdefault(shard.digest, shard)
    variants = [list(of_place.values()) for of_place in contents.values()]
    return [
        [of_place[min(number, len(of_place) - 1)] for of_place in variants]
        for number in range(max(map(len, variants)))
    ]


def _wrong(
    name: str,
    apart: float,
    trainer: list[Parameter],
    engine: list[Parameter],
    before: list[Parameter] | None,
) -> Wrong:
    earlier = before is not None and _differ(before, trainer) and not _differ(before, engine)
    norms = unshard.norm(trainer), unshard.norm(engine)
    same = (
        bool(norms[0])
        and norms[1] is not None
        and (
            abs(norms[1] / norms[0] - 1.0) <= _SAME_NORM  # type: ignore[operator]
        )
    )
    fits = (
        name
        for name, bits in _BITS.items()
        if 1 / _ABOUT <= apart / (_ROUNDING * 2.0**-bits) <= _ABOUT
    )
    return Wrong(name, apart, earlier, same and apart > _ELSEWHERE, next(fits, None))


def _differ(one: list[Parameter], other: list[Parameter]) -> bool:
    apart = _apart(one, other)
    return apart is not None and apart > _allowed(one, other)


def _apart(one: list[Parameter], other: list[Parameter]) -> float | None:
    """Relative difference of two readings of a parameter; None where that is not known."""
    if one[0].part.shape != other[0].part.shape:
        return None
    if not {one[0].dtype, other[0].dtype} <= _FLOATS:
        return None  # quantised: numbers of another scale
    least = 0.0
    wholes = [shards[0] for shards in (one, other) if shards[0].part.complete]
    if len(wholes) == 2 and wholes[0].dtype == wholes[1].dtype:
        digests = [whole.digest for whole in wholes]
        if None not in digests:
            if digests[0] == digests[1]:
                return 0.0
            least = _DIGESTS
    sketches = unshard.sketch(one), unshard.sketch(other)
    norm = unshard.norm(one)
    if sketches[0] is None or sketches[1] is None or norm is None:
        return None
    size = norm or unshard.norm(other) or 1.0
    return max(least, float(distance(sketches[0], sketches[1]) / size))


def _allowed(trainer: list[Parameter], engine: list[Parameter]) -> float:
    """What sketches of equal numbers differ by; and once rounded, where the engine keeps less."""
    if trainer[0].dtype == engine[0].dtype:
        return SHARDED
    return max(SHARDED, _KEPT.get(engine[0].dtype, 0.0), _KEPT.get(trainer[0].dtype, 0.0))


def describe(sync: Sync) -> Said:
    """What is the matter with the weights of a step, in words with figures.

    Args:
        sync: of a kind.
    """
    first = sync.wrong[0]
    given = {
        "wrong": len(sync.wrong),
        "count": sync.compared,
        "names": listed([one.name for one in sync.wrong], _NAMED),
    }
    if sync.kind == STALE:
        return say(
            "the engine has the weights of the captured step before: the update did not reach it "
            "({wrong} of {count}: {names})",
            **given,
        )
    if sync.kind == HALF:
        return say(
            "{wrong} of the {moved} weights that the trainer has changed are in the engine those "
            "of the captured step before: the update reached it in part ({names})",
            **given,
            moved="?" if sync.moved is None else sync.moved,
        )
    if sync.kind == SPLIT:
        return say(
            "{wrong} of {count} weights of the engine have the trainer's numbers at other places: "
            "they were cut or put together otherwise ({names})",
            **given,
        )
    if sync.kind == ROUNDED:
        return say(
            "{wrong} of {count} weights of the engine differ from the trainer's by {apart}, as "
            "rounding to {format} leaves: they were rounded or quantised on the way ({names})",
            **given,
            apart=f"{first.apart or 0.0:.2g}",
            format=first.rounded or "?",
        )
    assert sync.kind == OTHER
    return say(
        "{wrong} of {count} weights of the engine are others than the trainer's, the first by "
        "{apart} of its norm ({names})",
        **given,
        apart=f"{first.apart or 0.0:.2g}",
    )


def line(sync: Sync) -> Said:
    """How the weights of a step stand, in one line."""
    if sync.kind is not None:
        return say("step {step}: {what}", step=sync.step, what=describe(sync))
    if not sync.compared:
        return say(
            "step {step}: none of the engine's {left} weights is called as one of the trainer's "
            "({names}): whether they are the same is not known",
            step=sync.step,
            left=len(sync.left),
            names=listed(sync.left, _NAMED),
        )
    return say(
        "step {step}: all {count} weights of the engine that have a counterpart are the trainer's "
        "by digest or sketch ({left} have none)",
        step=sync.step,
        count=sync.compared,
        left=len(sync.left),
    )
