"""What a run says of its software and of its framework's settings, leaf by leaf.

``environment.json`` says it of each process, ``dump/configurations.json`` of all. A leaf has
another value, or is missing. What the gate holds against nothing is declared, with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlprobe.diagnose.gate import configuration
from rlprobe.judge.reasons import HARMLESS, INTENDED, UNIMPORTED
from rlprobe.selftest.blind.quantities import CONFIGURATION, ENVIRONMENT, MISSING, Quantity
from rlprobe.store.read import Run

_ENVIRONMENT, _CONFIGURATION = "environment.json", "dump/configurations.json"
#: Parts of a process's environment that are held against the other side's; all others are intended.
_JUDGED = frozenset({"versions", "code", "switches", "dropout"})
#: Parts of an environment by which floors are told: which factors a device rounds.
_OF_FLOORS = frozenset({"device", "switches", "variables"})
_MOVED = 0.1


def of(target: Run) -> list[Quantity]:
    """Every leaf of both files that a run has; and each process, which can be missing."""
    return [*_environment(target), *_configuration(target)]


def judges(quantity: Quantity, way: str) -> str | None:
    """Why a leaf that is disturbed in this way is held against nothing; None where it is."""
    if quantity.kind != ENVIRONMENT or way != MISSING or quantity.declared is not None:
        return quantity.declared
    path = json.loads(quantity.key)
    return UNIMPORTED if path[2:3] == ["code"] else None


def of_floors(quantity: Quantity) -> bool:
    """Whether floors may be others with it, so that every stage is judged anew."""
    if quantity.kind != ENVIRONMENT:
        return False
    path = json.loads(quantity.key)
    return len(path) < 3 or path[2] in _OF_FLOORS


def changed(data: bytes, quantity: Quantity, way: str) -> bytes | None:
    """The file with one leaf of another value, or without it; None where that changes nothing."""
    whole = json.loads(data)
    *way_there, last = json.loads(quantity.key)
    inner = whole
    for key in way_there:
        inner = inner[key]
    value = inner[last]
    if way == MISSING:
        if value in ({}, []):
            return None  # it says that there is none, and so does its absence
        del inner[last]
    elif len(way_there) < 2 and quantity.kind == ENVIRONMENT:
        return None  # a process is there or missing
    else:
        inner[last] = _another(value)
    return json.dumps(whole).encode()


def _another(value: Any) -> Any:
    if isinstance(value, dict):
        return {"disturbed": _MOVED}
    if isinstance(value, list):
        return [*value, "disturbed"]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * (1.0 + _MOVED) if value else _MOVED
    return "disturbed" if value is None else f"{value} disturbed"


def _environment(target: Run) -> Iterator[Quantity]:
    for process in target.environment():
        at = ["processes", process]
        yield _quantity(ENVIRONMENT, _ENVIRONMENT, at, ("process",), None)
        for path in _leaves(target.environment()[process]):
            declared = None if path[0] in _JUDGED else INTENDED
            yield _quantity(ENVIRONMENT, _ENVIRONMENT, [*at, *path], path, declared)


def _configuration(target: Run) -> Iterator[Quantity]:
    path = target.dump / "configurations.json"
    if not path.is_file():
        return
    for leaf in _leaves(json.loads(path.read_bytes())):
        kind = configuration.kind(".".join(leaf))
        declared = HARMLESS if kind == "harmless" else None
        yield _quantity(CONFIGURATION, _CONFIGURATION, leaf, (kind, *leaf[:1]), declared)


def _quantity(
    kind: str, file: str, path: list[str], group: tuple[str, ...] | list[str], declared: str | None
) -> Quantity:
    name = ".".join(path)
    return Quantity(
        kind, None, file, None, (kind, *group), name, None, declared, key=json.dumps(path)
    )


def _leaves(value: dict[str, Any], *before: str) -> Iterator[list[str]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, *before, key)
        else:
            yield [*before, key]
