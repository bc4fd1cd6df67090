"""What the optimizers of both sides were told as they stepped, held against each other.

A learning rate, a beta or an epsilon is told and not computed: where it differs there is no
round-off to hold it against, in whatever format and layout the sides are. By parameter, as their
groups are every back end's own; a setting that one side alone has says nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlprobe.said import COMMA, Said, joined, listed, say

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: Schedules work rates out in floating-point numbers, and rates may be kept as fp32 tensors.
_ROUNDING = 1e-6
_DECAY = "weight_decay"


@dataclass(frozen=True)
class Setting:
    """A setting that differs, and the parameters that were stepped with it."""

    name: str
    benchmark: str
    target: str
    #: The target's ranks that were told so, where others of the same parameters were not.
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    #: Of how many that both sides step.
    compared: int
    #: Decay that one back end of two leaves out of some parameters: Megatron decays neither norms
    #: nor biases.
    by_design: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it chooses between ways to compute, and is no number."""
        return not {self.benchmark, self.target}.isdisjoint(("True", "False"))

    @property
    def said(self) -> Said:
        """It in words."""
        told = say(
            "{name} {target} on the target instead of {benchmark}",
            name=self.name,
            target=self.target,
            benchmark=self.benchmark,
        )
        if self.ranks:
            told += say(" on rank {ranks} alone", ranks=listed(map(str, self.ranks)))
        if len(self.parameters) == self.compared:
            return told
        return told + say(
            " for {count} of {total} parameters ({names})",
            count=len(self.parameters),
            total=self.compared,
            names=listed(self.parameters, 2),
        )


@dataclass(frozen=True)
class Told:
    """What the optimizers of both sides were told in a stage's updates."""

    #: The first update in which something differs, from 0; the last one where nothing does.
    update: int
    settings: tuple[Setting, ...]
    #: Parameters that both sides step, and settings that both have of them.
    parameters: int
    names: tuple[str, ...]

    @property
    def differing(self) -> tuple[Setting, ...]:
        """Settings that differ for no known reason."""
        return tuple(one for one in self.settings if not one.by_design)

    @property
    def module(self) -> str | None:
        """The module whose parameters alone were told otherwise, where there are others."""
        names = {name for one in self.differing for name in one.parameters}
        modules = {name.rpartition(".")[0] for name in names}
        return modules.pop() if len(modules) == 1 and len(names) < self.parameters else None

    def said(self, settings: tuple[Setting, ...]) -> Said:
        """Which settings, in words."""
        return say(
            "the optimizer steps with {settings} in update {update} of the stage",
            settings=joined((one.said for one in settings), COMMA),
            update=self.update,
        )


class Lone(NamedTuple):
    """What one side alone says that its optimizers were told in a stage's updates."""

    #: Names of settings, and of parameters of which it says anything.
    settings: tuple[str, ...]
    parameters: tuple[str, ...]


#: What a parameter was told: settings by name, and the ranks that were told so.
_Values = list[tuple[dict[str, Any], tuple[int, ...]]]


def compare(benchmark: Run, target: Run, stage: str, step: int) -> Told | None:
    """The first update of a stage that was told otherwise; None where a side does not say.

    Raises:
        StoreError: what a run says is damaged.
    """
    sides = [
        [line for line in run.optimizers() if (line["stage"], line["step"]) == (stage, step)]
        for run in (benchmark, target)
    ]
    if not all(sides):
        return None
    unlike = _is_megatron(benchmark) != _is_megatron(target)
    found = None
    for update in sorted({line["update"] for lines in sides for line in lines}):
        found = _of_update(update, _at(sides[0], update), _at(sides[1], update), unlike)
        if found.settings:
            break
    return found


def lone(benchmark: Run, target: Run, stage: str, step: int) -> Lone:
    """What one side alone says of a stage's updates; nothing between unlike back ends, whose
    optimizers have settings of their own.

    Raises:
        StoreError: what a run says is damaged.
    """
    if _is_megatron(benchmark) != _is_megatron(target):
        return Lone((), ())
    sides = [
        [line for line in run.optimizers() if (line["stage"], line["step"]) == (stage, step)]
        for run in (benchmark, target)
    ]
    settings, parameters = set[str](), set[str]()
    alike = benchmark.manifest.layout == target.manifest.layout
    for update in {line["update"] for lines in sides for line in lines}:
        left, right = (_at(lines, update) for lines in sides)
        parameters |= left.keys() ^ right.keys()
        for name in left.keys() & right.keys():
            settings |= _of_one_side(left[name], right[name])
            if alike and _ranks(left[name]) != _ranks(right[name]):  # one rank's word is its own
                parameters.add(name)
    return Lone(tuple(sorted(settings)), tuple(sorted(parameters)))


def _of_one_side(left: _Values, right: _Values) -> set[str]:
    """Settings of one parameter that one side alone has: rank by rank, where they are the same."""
    sides = [
        {rank: settings.keys() for settings, ranks in values for rank in ranks}
        for values in (left, right)
    ]
    if sides[0].keys() != sides[1].keys():  # the parameter lies elsewhere
        everywhere = [set[str]().union(*side.values()) for side in sides]
        return everywhere[0] ^ everywhere[1]
    return set[str]().union(*(sides[0][rank] ^ sides[1][rank] for rank in sides[0]))


def _ranks(values: _Values) -> set[int]:
    """The ranks that say what a parameter was told."""
    return {rank for _, ranks in values for rank in ranks}


def _at(lines: list[dict[str, Any]], update: int) -> dict[str, _Values]:
    """What each parameter was told in an update: as in the one before, where nothing is said."""
    latest: dict[int, int] = {}
    for index, line in sorted(enumerate(lines), key=lambda item: item[1]["update"]):
        if line["update"] <= update:
            latest |= dict.fromkeys(line["ranks"], index)
    found: dict[str, _Values] = {}
    for index in sorted(set(latest.values())):
        ranks = tuple(sorted(rank for rank, own in latest.items() if own == index))
        for group in lines[index]["groups"]:
            for name in group["names"]:
                found.setdefault(name, []).append((group["settings"], ranks))
    return found


def _of_update(
    update: int, left: dict[str, _Values], right: dict[str, _Values], unlike: bool
) -> Told:
    both = [name for name in left if name in right]
    known: dict[tuple[int, ...], list[_Odd]] = {}
    counts: Counter[str] = Counter()
    apart: dict[_Odd, list[str]] = {}
    for parameter in both:
        told = left[parameter], right[parameter]
        key = tuple(id(settings) for values in told for settings, _ in values)
        key = (len(told[0]), *key)
        if key not in known:
            known[key] = _odd(*told)
        for odd in known[key]:
            apart.setdefault(odd, []).append(parameter)
        counts.update(told[0][0][0].keys() & told[1][0][0].keys())
    decay = [odd for odd in apart if odd.name == _DECAY]
    by_design = unlike and all(_text(0.0) in (odd.benchmark, odd.target) for odd in decay)
    settings = [
        Setting(*odd, tuple(names), counts[odd.name], by_design and odd in decay)
        for odd, names in sorted(apart.items())
    ]
    return Told(update, tuple(settings), len(both), tuple(sorted(counts)))


class _Odd(NamedTuple):
    """A setting that differs, as text, and the ranks of the target that were told so alone."""

    name: str
    benchmark: str
    target: str
    ranks: tuple[int, ...]


def _odd(left: _Values, right: _Values) -> list[_Odd]:
    """Settings that a rank of one side was told and none of the other."""
    found = []
    for name in sorted(left[0][0].keys() & right[0][0].keys()):
        sides = [
            [(settings[name], ranks) for settings, ranks in values if name in settings]
            for values in (left, right)
        ]
        odd = _apart(*sides)
        if odd is None:
            continue
        b, t = odd
        ranks = () if all(_same(value, t[0]) for value, _ in sides[1]) else t[1]
        found.append(_Odd(name, _text(b[0]), _text(t[0]), ranks))
    return found


#: A setting's value, and the ranks that were told so.
_Value = tuple[Any, tuple[int, ...]]


def _apart(benchmark: list[_Value], target: list[_Value]) -> tuple[_Value, _Value] | None:
    """A value of each side that are not the same: of one rank, where the same ranks have the
    parameter, and else one that no rank of the other side was told."""
    ranks = [sorted(rank for _, own in side for rank in own) for side in (benchmark, target)]
    if ranks[0] == ranks[1]:
        return next(
            (
                (b, (t[0], tuple(sorted({*b[1]} & {*t[1]}))))
                for t in target
                for b in benchmark
                if {*b[1]} & {*t[1]} and not _same(b[0], t[0])
            ),
            None,
        )
    alone = next((t for t in target if not _is_among(t[0], benchmark)), None)
    lacking = next((b for b in benchmark if not _is_among(b[0], target)), None)
    if alone is None and lacking is None:
        return None
    return lacking or benchmark[0], alone or target[0]


def _is_among(value: Any, values: list[_Value]) -> bool:
    return any(_same(value, other) for other, _ in values)


def _is_megatron(run: Run) -> bool:
    return any("megatron" in (process.backend or "").lower() for process in run.manifest.layout)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    numbers = [isinstance(value, (int, float)) for value in (one, other)]
    if all(numbers):
        return bool(abs(one - other) <= _ROUNDING * max(abs(one), abs(other)))
    return bool(one == other)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_text, value))})"
    return f"{value:.7g}" if isinstance(value, float) else str(value)
