"""Whether what processes say that they loaded can be all of the benchmark's state.

The counts in ``joined.json`` are held against the same process's of the other joined steps and of
controls laid out alike, and against what its optimizer stepped; what they cannot all be is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlprobe import stages
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.said import Said, listed, say
from rlprobe.store.manifest import Process
from rlprobe.store.read import Run

_PARAMETERS, _STATES, _LEFT = "parameters", "states", "left"
#: Megatron's names are split as Hugging Face's are where optimizers are told of, and are not where
#: a state is loaded.
_OWN_NAMES = "fsdp"
#: Names of weights that moved are written down up to here.
_NAMED = 8


@dataclass(frozen=True)
class Loaded:
    """What is wrong with the counts of a step's lines."""

    #: Parts of the model that began from the target's own state.
    lacking: tuple[Said, ...] = ()
    #: What cannot be true together, or is not said.
    odd: tuple[Said, ...] = ()


class _Other(NamedTuple):
    """A line of another step, or of a control, and whether that ran on the target's device."""

    line: dict[str, Any]
    same_device: bool


def examine(evidence: Evidence, lines: list[dict[str, Any]]) -> Loaded:
    """Look at the lines of the judged step, one a role and rank.

    Args:
        evidence: both runs and the controls.
        lines: of the target, of this step.

    Raises:
        StoreError: a run is damaged.
    """
    lacking: list[Said] = []
    odd: list[Said] = []
    others = list(_others(evidence))
    for line in lines:
        who = say("{role} on rank {rank}", role=line["role"], rank=line["rank"])
        same = [one for one in others if _process(one.line) == _process(line)]
        stepped = _stepped(evidence.target, line)
        for what, name in ((_PARAMETERS, say("parameters")), (_STATES, say("optimizer states"))):
            count = line.get(what)
            known = [one.line[what] for one in same if one.line.get(what) is not None]
            known += [] if stepped is None or known else [stepped]
            if count is None or (what == _PARAMETERS and not count and not any(known)):
                odd.append(say("{who} does not say how many {name} it loaded", who=who, name=name))
            elif known and count < max(known):
                lacking.append(
                    say(
                        "{who}: {count} of {most} {name}",
                        who=who,
                        count=count,
                        most=max(known),
                        name=name,
                    )
                )
            elif known and count > min(known):
                odd.append(
                    say(
                        "{who} says that it loaded {count} {name}, where {least} are known",
                        who=who,
                        count=count,
                        name=name,
                        least=min(known),
                    )
                )
        odd += _of_left(line, same, who)
        odd += _of_generators(line, same, who)
        odd += _of_optimizer(line, others, who)
    return Loaded(tuple(lacking), tuple(odd))


def _process(line: dict[str, Any]) -> tuple[str, int]:
    return line["role"], line["rank"]


def _others(evidence: Evidence) -> Iterator[_Other]:
    """Lines of other steps, and of controls' processes that stood where the target's did."""
    step, target = evidence.step.number, evidence.target
    yield from (_Other(line, True) for line in target.joined() if line["step"] != step)
    places = _places(target)
    for control in evidence.controls.values():
        device = control.manifest.declared.get("device") == target.manifest.declared.get("device")
        alike = {who for who, place in _places(control).items() if places.get(who) == place}
        for line in control.joined() if control.is_joined else ():
            if _process(line) in alike:
                yield _Other(line, device)


def _places(run: Run) -> dict[tuple[str, int], Process]:
    return {(one.role, one.rank): one for one in run.manifest.layout}


def _stepped(target: Run, line: dict[str, Any]) -> int | None:
    """How many parameters the process's optimizer steps; None where that is not known."""
    place = _places(target).get(_process(line))
    if place is None or _OWN_NAMES not in (place.backend or "").lower():
        return None
    # of any step: a row is an update that was told otherwise than the one before it
    names = {
        name
        for told in target.optimizers()
        if line["rank"] in told["ranks"] and stages.MODEL_ROLE.get(told["stage"]) == line["role"]
        for group in told["groups"]
        for name in group["names"]
    }
    return len(names) or None


def _of_generators(line: dict[str, Any], same: list[_Other], who: Said) -> Iterator[Said]:
    """On one device all can be put back, or none of them can."""
    known = {str(one.line.get("generators") or "") for one in same if one.same_device}
    own = line.get("generators")
    if known and str(own or "") not in known:
        yield say(
            "{who}: {why}, which is not so where others loaded it",
            who=who,
            why=say("every random generator was put back") if own is None else str(own),
        )


def _of_left(line: dict[str, Any], same: list[_Other], who: Said) -> Iterator[Said]:
    """What was compared with what the update before had left."""
    left = line.get(_LEFT)
    known = [one.line[_LEFT]["compared"] for one in same if one.line.get(_LEFT)]
    if left is None:
        if known:
            yield say("{who} does not say what its own updates had left", who=who)
        return
    # of the whole model, frozen parameters too
    most = max([*known, line.get(_PARAMETERS) or 0])
    if left["compared"] < most or left["compared"] > min(known, default=left["compared"]):
        yield say(
            "{who}: {count} parameters were compared with what its own updates had left, where "
            "{known} are known",
            who=who,
            count=left["compared"],
            known=most if left["compared"] < most else min(known),
        )
    if len(left["names"]) != min(left["moved"], _NAMED):
        yield say(
            "{who} says that {moved} parameters moved and names {names}",
            who=who,
            moved=left["moved"],
            names=listed(map(str, left["names"]), 4) if left["names"] else say("no parameter"),
        )


def _of_optimizer(line: dict[str, Any], others: list[_Other], who: Said) -> Iterator[Said]:
    """All load one state, which one class of optimizer left."""
    own = line.get("optimizer")
    lines = [one.line for one in others if one.line["role"] == line["role"]]
    known = {str(one["optimizer"]) for one in lines if one.get("optimizer") is not None}
    if known and known != {str(own)}:
        yield say(
            "{who} says that the state is one of {optimizer}, others of {others}",
            who=who,
            optimizer=say("nothing that is said") if own is None else str(own),
            others=listed(sorted(known), 2),
        )
