"""What a run says of its software, of its framework's settings and of a state that it loaded, leaf
by leaf.

``environment.json`` says it of each process, ``dump/configurations.json`` of all, ``joined.json``
of each process and joined step. A leaf has another value, or is missing. What the gate holds
against nothing is declared, with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rlprobe.diagnose import unheld
from rlprobe.diagnose.gate import configuration
from rlprobe.judge.reasons import HARMLESS, INTENDED, UNIMPORTED
from rlprobe.selftest.blind.quantities import (
    CONFIGURATION,
    ENVIRONMENT,
    JOINED,
    MISSING,
    ZERO,
    Quantity,
)
from rlprobe.store.read import Run

_ENVIRONMENT = "environment.json"
#: Parts of an environment by which floors are told: which factors a device rounds.
_OF_FLOORS = frozenset({"device", "switches", "variables"})
_MOVED = 0.1


def of(target: Run) -> list[Quantity]:
    """Every leaf of the files that a run has; and each process, which can be missing."""
    return [*_environment(target), *_configuration(target), *_joined(target)]


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
        if value in ({}, []) or (quantity.kind == JOINED and value is None):
            return None  # it says that there is none, and so does its absence
        del inner[last]
    elif quantity.kind == JOINED:
        inner[last] = _said_otherwise(value, way)
        if inner[last] == value:
            return None
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


def _said_otherwise(value: Any, way: str) -> Any:
    """Of what a process loaded: one more, or nothing, in the kind that it is written in."""
    if isinstance(value, int):
        return 0 if way == ZERO else value + 1
    if way == ZERO:
        return type(value)() if isinstance(value, list | str) else None
    return _another(value)


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


def _joined(target: Run) -> Iterator[Quantity]:
    for number, line in enumerate(target.joined()):
        for leaf in unheld.leaves(line):
            of = (JOINED, line["role"], ".".join(leaf), str(line["step"]), str(line["rank"]))
            yield _quantity(JOINED, "joined.json", ["joined", number, *leaf], of, None)


def _quantity(
    kind: str,
    file: str,
    path: Sequence[str | int],
    group: tuple[str, ...] | list[str],
    declared: str | None,
) -> Quantity:
    name = ".".join(map(str, path))
    return Quantity(
        kind, None, file, None, (kind, *group), name, None, declared, key=json.dumps(path)
    )
