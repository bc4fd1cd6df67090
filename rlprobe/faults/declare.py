"""How a fault or a benign change is written down, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rlprobe import stages
from rlprobe.causes import CAUSES
from rlprobe.errors import ConfigError

#: A generator function that yields once: before the stage, then after it.
Plant = Callable[["Site"], Iterator[None]]

_ATTRIBUTE = "_rlprobe_declaration"


@dataclass
class Site:
    """Where a fault is planted: one stage about to run in one training process."""

    #: actor, ref, critic or teacher.
    role: str
    #: Canonical stage name.
    stage: str
    #: Step counted from 0.
    step: int
    #: The model without its wrappers, or the list of its chunks.
    model: Any
    #: The optimizer of an update stage, else None.
    optimizer: Any
    #: What the stage was called with (verl: a TensorDict); may be changed in place.
    batch: Any
    rank: int
    world_size: int
    #: The framework's configuration object of this worker.
    config: Any
    #: 1.0, or smaller where a weakened fault is asked for.
    strength: float = 1.0


@dataclass(frozen=True)
class Declaration:
    """What a diagnosis should find of one fault; ``stage`` is None for a benign change."""

    name: str
    stage: str | None
    module: str | None = None
    cause: tuple[str, ...] = ()
    verdict: str = "diverged"
    needs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_benign(self) -> bool:
        return self.stage is None


def fault(
    *bare: Any,
    stage: str = "",
    module: str | None = None,
    cause: str | tuple[str, ...] = (),
    verdict: str = "diverged",
    needs: dict[str, Any] | None = None,
) -> Callable[[Plant], Plant]:
    """Declare a fault: where it first shows, in which module (or None) and of which cause.

    It is entered each time ``stage`` is about to run, in every training process.

    Raises:
        ConfigError: an unknown stage, cause or verdict, needs that are no mapping, or a decorator
            without its parentheses.
    """
    if bare:
        raise ConfigError("@fault is called: @fault(stage=…, module=…, cause=…)")
    causes = (cause,) if isinstance(cause, str) else tuple(cause)
    unknown = [c for c in causes if c not in CAUSES]
    if unknown:
        raise ConfigError(f"cause {unknown[0]!r} is unknown; accepted: {', '.join(CAUSES)}")
    if verdict not in ("diverged", "not_comparable"):
        raise ConfigError(
            f"verdict {verdict!r} of a fault is unknown; accepted: diverged, not_comparable"
        )
    if not causes:
        raise ConfigError("a fault needs a cause; 'unknown' is one")
    where = stages.canonical(stage)
    if where == stages.GENERATE:
        raise ConfigError(
            f"stage {where} is replayed from the benchmark's rollouts and cannot hold a fault"
        )

    wanted = _needs(needs)

    def declare(plant: Plant) -> Plant:
        name = plant.__name__
        return _declared(plant, Declaration(name, where, module, causes, verdict, wanted))

    return declare


def benign(*bare: Any, needs: dict[str, Any] | None = None) -> Callable[[Plant], Plant]:
    """Declare a change that must not alarm; it is entered before every stage.

    Raises:
        ConfigError: needs that are no mapping, or a decorator without its parentheses.
    """
    if bare:
        raise ConfigError("@benign is called: @benign()")
    wanted = _needs(needs)

    def declare(plant: Plant) -> Plant:
        return _declared(plant, Declaration(plant.__name__, None, verdict="aligned", needs=wanted))

    return declare


def _needs(needs: Any) -> dict[str, Any]:
    if needs is not None and not isinstance(needs, dict):
        raise ConfigError(f"needs is a mapping of what the alignment must have, found {needs!r}")
    return dict(needs or {})


def _declared(plant: Plant, found: Declaration) -> Plant:
    if declaration(getattr(plant, "__globals__", {}).get(found.name)) is not None:
        raise ConfigError(f"{found.name} is declared twice; names are unique")
    setattr(plant, _ATTRIBUTE, found)
    return plant


def declaration(plant: Any) -> Declaration | None:
    """The declaration of a decorated function, or None for anything else."""
    found = getattr(plant, _ATTRIBUTE, None)
    return found if isinstance(found, Declaration) else None
