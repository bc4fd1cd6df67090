"""What a run says of its software and of its framework's settings, leaf by leaf.

``environment.json`` says it of each process, ``dump/configurations.json`` of all. A leaf has
another value, or is missing. What the gate holds against nothing is declared, with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlprobe.diagnose import unheld
from rlprobe.diagnose.gate import configuration
from rlprobe.judge.reasons import HARMLESS, INTENDED, UNIMPORTED
from rlprobe.selftest.blind.quantities import CONFIGURATION, ENVIRONMENT, MISSING, Quantity
from rlprobe.store.read import Run

_ENVIRONMENT = "environment.json"
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
    return UNIMPORTED if path[2:3] == [unheld.CODE] else None


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
        for path in unheld.leaves(target.environment()[process]):
            declared = None if path[0] in unheld.JUDGED else INTENDED
            yield _quantity(ENVIRONMENT, _ENVIRONMENT, [*at, *path], path, declared)


def _configuration(target: Run) -> Iterator[Quantity]:
    for leaf in unheld.leaves(unheld.configurations(target)):
        kind = configuration.kind(".".join(leaf))
        declared = HARMLESS if unheld.is_harmless(leaf) else None
        yield _quantity(CONFIGURATION, unheld.CONFIGURATION, leaf, (kind, *leaf[:1]), declared)


def _quantity(
    kind: str, file: str, path: list[str], group: tuple[str, ...] | list[str], declared: str | None
) -> Quantity:
    name = ".".join(path)
    return Quantity(
        kind, None, file, None, (kind, *group), name, None, declared, key=json.dumps(path)
    )
