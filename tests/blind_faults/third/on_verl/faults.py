"""Declares every fault of ``answers.yaml``: its kind is planted with its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _attention_kinds
import _layer_kinds
import _result_kinds
import _step_kinds
import yaml

from rlprobe.selftest import Site, fault

ANSWERS = Path(__file__).parents[1] / "answers.yaml"
#: Where a kind is looked for, by its name.
ROOMS = (_attention_kinds, _layer_kinds, _result_kinds, _step_kinds)


def kind_of(name: str) -> Callable[..., Iterator[None]]:
    """The generator function that plants a kind.

    Raises:
        LookupError: none has this name, or several rooms have one.
    """
    found = [vars(room)[name] for room in ROOMS if name in vars(room)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} kinds of fault are called {name}")
    kind: Callable[..., Iterator[None]] = found[0]
    return kind


def declared(name: str, answer: dict[str, Any]) -> Callable[[Site], Iterator[None]]:
    """The fault of one answer: ``kind(site, at, **with)`` around its stage."""
    kind, parameters = kind_of(answer["kind"]), answer.get("with", {})
    (module, *_) = answer["modules"]

    def plant(site: Site) -> Iterator[None]:
        yield from kind(site, answer.get("at", module), **parameters)

    plant.__name__ = name
    declare = fault(
        stage=answer["stage"],
        module=module,
        cause=answer["cause"],
        verdict=answer.get("verdict", "diverged"),
        needs=answer.get("needs"),
    )
    return declare(plant)


globals().update(
    (name, declared(name, answer))
    for name, answer in yaml.safe_load(ANSWERS.read_text(encoding="utf-8"))["verl"].items()
)
