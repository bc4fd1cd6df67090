"""What each process of a run recorded of its software, role by role.

Processes of a run mostly say the same, so that what all of them say together hides what one of them
lacks, and two that have exchanged their settings: roles are held against each other besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlprobe.store.read import Run

#: What stands for a value that one process of several does not have.
ABSENT = "(absent)"

Settings = dict[str, Any]
Shared = Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Settings, Settings]]


def gathered(run: Run, part: str) -> Settings:
    """A part of every process's environment; values that processes disagree on are listed."""
    found: dict[str, set[str]] = {}
    for process in run.environment().values():
        for key, value in (process.get(part) or {}).items():
            found.setdefault(str(key), set()).add(str(value))
    return {key: ", ".join(sorted(values)) for key, values in found.items()}


def by_role(run: Run, part: str) -> dict[str, Settings]:
    """The same of each role alone, where what a process lacks and another has is said as well."""
    roles: dict[str, list[Mapping[str, Any]]] = {}
    for name, process in run.environment().items():
        roles.setdefault(name.rpartition("-rank")[0] or name, []).append(process.get(part) or {})
    return {
        role: {
            str(key): ", ".join(sorted({str(one.get(key, ABSENT)) for one in every}))
            for key in sorted({key for one in every for key in one})
        }
        for role, every in roles.items()
    }


def unlike(benchmark: Run, target: Run, part: str, shared: Shared | None = None) -> list[str]:
    """Keys that differ between processes of one role, of roles that both sides have.

    Args:
        benchmark, target: the sides.
        part: of an environment.
        shared: leaves out what is no difference.
    """
    left, right = by_role(benchmark, part), by_role(target, part)
    found = []
    for role in sorted(left.keys() & right.keys()):
        b, t = left[role], right[role]
        if shared is not None:
            b, t = shared(b, t)
        found += [
            f"{key} ({role}): {b.get(key, ABSENT)} -> {t.get(key, ABSENT)}"
            for key in sorted(b.keys() | t.keys())
            if b.get(key, ABSENT) != t.get(key, ABSENT)
        ]
    return found


def unrecorded(run: Run) -> list[str]:
    """Processes that trained and recorded no environment, of a run whose others did."""
    recorded = run.environment()
    names = [f"{process.role}-rank{process.rank}" for process in run.manifest.layout]
    return [name for name in names if name not in recorded] if recorded else []


def of_one_kind(benchmark: Run, target: Run) -> bool:
    """Whether both sides ran on one kind of device with one torch: they have the same switches."""
    sides = [
        (
            {str(process.get("device")) for process in run.environment().values()},
            gathered(run, "versions").get("torch"),
        )
        for run in (benchmark, target)
    ]
    return sides[0] == sides[1]
