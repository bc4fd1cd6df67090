"""At the start of a captured step: a collecting run keeps a model's state, a joined one loads it.

A framework's hooks hold one :class:`Joining` and call it as the first thing of every stage, before
anything of it is recorded or planted. The first step of a run is neither kept nor joined: both
sides begin it from what they load themselves, and a wrong load is to be found.

What was loaded hides what had become of the weights since the update before. So a joined run's are
compared with what that update left, by digest, before they are overwritten: whatever moved them in
between is named (``left`` in the line of ``joined``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from rlprobe.capture import weights
from rlprobe.capture.light.statistics import has_values
from rlprobe.capture.parameters import held
from rlprobe.capture.parts import Parts
from rlprobe.capture.session import Session
from rlprobe.capture.state import directory
from rlprobe.capture.state.join import join
from rlprobe.capture.state.keep import keep

#: Weights that moved are named up to here.
_NAMED = 8


class Joining:
    """Of one process.

    Args:
        session: what is to be kept or joined.
        rank, world_size: of this process among the training processes.
    """

    def __init__(self, session: Session, rank: int, world_size: int) -> None:
        self._session = session
        self._rank = rank
        self._world_size = world_size
        self._done: set[tuple[str, int]] = set()
        #: Digests of the weights that a role's last update left.
        self._left: dict[str, dict[str, str]] = {}

    def left(self, role: str, step: int, models: list[nn.Module]) -> None:
        """A role's update is over; its weights are next seen where the following step loads others.

        Not for models whose weights follow later than the optimizer's step (Megatron's, which may
        gather them as the next pass begins).

        Args:
            role: actor or critic.
            step: of the update, counted from 0.
            models: the model's chunks.
        """
        if self._session.join_states is not None and self._session.joins_step(step + 1):
            self._left[role] = _digests(models)

    def _since_left(self, role: str, models: list[nn.Module]) -> dict[str, Any] | None:
        """How many weights were compared with what the last update left, and which moved; None
        where that is not known."""
        before = self._left.pop(role, None)
        if not before:
            return None
        now = _digests(models)
        moved = sorted(name for name, digest in before.items() if now.get(name) != digest)
        return {"compared": len(before), "moved": len(moved), "names": moved[:_NAMED]}

    def enter(
        self, role: str, step: int, model: nn.Module | list[nn.Module], optimizer: Any
    ) -> None:
        """A role's model is about to run; does nothing but at its first stage of a captured step.

        On every rank, whichever are captured: all hold a part of the model.

        Args:
            role: actor or critic.
            step: counted from 0.
            model: the module, or its chunks.
            optimizer: the model's; None for one that is never trained, which needs no state.

        Raises:
            RunError: the state cannot be kept, or does not fit.
            ReplayError: there is none, or it is damaged.
        """
        session = self._session
        wanted = session.keep_states or session.join_states is not None
        if not wanted or optimizer is None or not session.joins_step(step):
            return
        if (role, step) in self._done:
            return
        self._done.add((role, step))
        models = list(model) if isinstance(model, (list, tuple)) else [model]
        if session.keep_states:
            keep(
                directory(Path(session.side) / "states", step),
                role=role,
                rank=self._rank,
                world_size=self._world_size,
                step=step,
                models=models,
                optimizer=optimizer,
            )
        if session.join_states is not None:
            since = self._since_left(role, models)
            done = join(
                directory(Path(session.join_states), step),
                role=role,
                rank=self._rank,
                models=models,
                optimizer=optimizer,
            )
            Parts(session, role, self._rank).line("joined", {"step": step, **done, "left": since})


def _digests(models: list[nn.Module]) -> dict[str, str]:
    """Of what this rank holds of every parameter, to the last bit."""
    return {
        item.name: weights.digest(item.local)
        for item in held(models)
        if item.exact and has_values(item.local)
    }
