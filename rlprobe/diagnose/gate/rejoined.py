"""Whether a joined step began from the benchmark's state on every process, and as it was there.

And whether the weights that were overwritten were still what the target's own update had left:
nothing else sees what moves them in between.
"""

from __future__ import annotations

from typing import Any

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import loaded
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, opened, shut
from rlprobe.roles import REPEAT
from rlprobe.said import SEMICOLON, joined, listed, say

ITEM = "state at the start"
_TRAINED = {stages.MODEL_ROLE[stage] for stage in stages.UPDATE_STAGES}
_OWN = say(
    "the target's own updates end with each step, so that curves, and whether weights move from "
    "one step to the next, are not judged"
)
_AGAIN = say("run the target again: what it computed there is not of the benchmark's state")
_UNKNOWN = say(
    "whether the weights before it were still what the target's own update had left was not "
    "recorded"
)


def check(evidence: Evidence) -> tuple[GateItem | None, Shut | None]:
    """Item ``state at the start``; None where the step began from each side's own state.

    Beside it where weights moved that nothing else sees, if they moved on the target alone.
    """
    step, target = evidence.step.number, evidence.target
    if not target.is_joined or step == 0:
        return None, None
    lines = [line for line in target.joined() if line["step"] == step]
    wanted = {(p.role, p.rank) for p in target.manifest.layout if p.role in _TRAINED}
    lacking = sorted(wanted - {(line["role"], line["rank"]) for line in lines})
    if lacking or not lines:
        said = say("no model")
        if lacking:
            said = listed((say("{role} on rank {rank}", role=r, rank=n) for r, n in lacking), 4)
        return shut(
            ITEM,
            say(
                "the benchmark's state was not loaded at step {step}: {models}",
                step=step,
                models=said,
            ),
            _AGAIN,
        ), None
    found = loaded.examine(evidence, lines)
    if found.lacking:
        return shut(
            ITEM,
            say(
                "not all of the benchmark's state was loaded at step {step}: {parts}",
                step=step,
                parts=joined(found.lacking, SEMICOLON),
            ),
            _AGAIN,
        ), None
    parameters, states = (_most(lines, what) for what in ("parameters", "states"))
    text = say(
        "weights of {parameters} parameters and the optimizer's state of {states} loaded from the "
        "benchmark",
        parameters=parameters,
        states=states,
    )
    left = [line["left"] for line in lines if line.get("left")]
    moved = [line for line in lines if line.get("left") and line["left"]["moved"]]
    if moved:
        return _moved(evidence, step, moved)
    if len(left) == len(lines):
        text += say(
            "; {count} parameters were before it what the target's own updates had left",
            count=sum(one["compared"] for one in left if one),
        )
    else:
        text += SEMICOLON + _UNKNOWN
    text += SEMICOLON + _OWN
    drawn = sorted({str(line["generators"]) for line in lines if line.get("generators")})
    if drawn:
        text += say("; random generators were not all put back ({why})", why=listed(drawn, 2))
    rounded = sorted({str(name) for line in lines for name in line.get("rounded") or ()})
    if rounded:
        text += say(
            "; {count} values are in formats that cannot hold the benchmark's: {names}",
            count=len(rounded),
            names=listed(rounded),
        )
    if found.odd:
        text += SEMICOLON + joined(found.odd, SEMICOLON)
        return caveat(ITEM, text, say("check by hand what the target's processes loaded")), None
    if rounded:
        action = say("keep weights and optimizer state in one format on both sides")
        return caveat(ITEM, text, action), None
    return opened(ITEM, text), None


def _moved(
    evidence: Evidence, step: int, lines: list[dict[str, Any]]
) -> tuple[GateItem, Shut | None]:
    """Something moved the target's weights between an update and the step behind it."""
    repeat = evidence.controls.get(REPEAT)
    own = [] if repeat is None else [one for one in repeat.joined() if one["step"] == step]
    alike = any((line.get("left") or {}).get("moved") for line in own)
    names = sorted({str(name) for line in lines for name in line["left"]["names"]})
    count = max(int(line["left"]["moved"]) for line in lines)
    text = say(
        "{count} parameters of the target moved between its own update and step {step}, where no "
        "update runs: {names}",
        count=count,
        step=step,
        names=listed(names),
    )
    if alike:
        return caveat(
            ITEM,
            text + say("; so did some of the benchmark's device"),
            say("see what else than the optimizer changes these weights, on both sides"),
        ), None
    action = say(
        "see what touches these weights behind the optimizer's step (loading, synchronising, "
        "offloading, merging adapters); joined steps begin without it, a training does not"
    )
    first = min(lines, key=lambda line: (line["role"], line["rank"]))
    stage = next(s for s in stages.UPDATE_STAGES if stages.MODEL_ROLE[s] == first["role"])
    module = {name.rpartition(".")[0] for name in names} if count == len(names) else set()
    values = {"parameter": names[0] if names else None, "parameters that moved": 0}
    return shut(ITEM, text, action), Shut(
        "weights",
        "weights",
        stage,
        first["rank"],
        module.pop() or None if len(module) == 1 else None,
        None,
        values,
        values | {"parameters that moved": count},
        [text],
        step - 1,
    )


def _most(lines: list[dict[str, Any]], what: str) -> int:
    """A count over roles; of ranks the largest, as each holds a part of most."""
    of_roles: dict[str, int] = {}
    for line in lines:
        of_roles[line["role"]] = max(of_roles.get(line["role"], 0), int(line.get(what) or 0))
    return sum(of_roles.values())
