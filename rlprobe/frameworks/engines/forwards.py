"""One forward of an engine: whether it is dumped, and as what.

A captured step is served one request at a time, so a forward belongs to one sample, and its
statistics too. Each forward in the token range is one entry of the generation stage, in the tree
that a CPU engine's dumps have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlprobe import stages
from rlprobe.capture.budget import Budget
from rlprobe.capture.recorder import Recorder
from rlprobe.errors import HookError
from rlprobe.frameworks.engines import forcing, handover, marks

#: Of the processes of an engine, apart from the training processes of the same ranks.
ROLE = "rollout"


@dataclass(frozen=True)
class Request:
    """A request's part in a forward."""

    id: str
    #: The generated token that the forward gives; 0 for every piece of the prompt's.
    token: int


class Forwards:
    """Captures the forwards of one engine in this process.

    Args:
        engine: its name: vllm or sglang.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._recorders: dict[str, Recorder] = {}
        self._budget: Budget | None = None
        self._inside = False

    def run(
        self, model: Any, requests: Callable[[], Sequence[Request]], call: Callable[[], Any]
    ) -> Any:
        """Run a forward, dumped if a request in it asks for that.

        Args:
            model: what runs; a module, or the hooks would see nothing.
            requests: whose tokens the forward works on; asked for only where there is a session.
            call: the forward.

        Raises:
            HookError: the forward mixes requests, or ran no hook.
        """
        given = handover.taken()
        # a subclass's method may call the one it overrides, which is wrapped as well
        if given is None or self._inside:
            return call()
        present = requests()
        marked = [(mark, r) for r in present if (mark := marks.find(r.id)) is not None]
        for mark, _ in marked:
            if mark.phase == marks.WEIGHTS:
                self._digest(mark, model)
        marked = [(mark, r) for mark, r in marked if mark.phase != marks.WEIGHTS]
        if not marked:
            return call()
        if len(present) > 1:
            raise HookError(
                f"{self._engine}: a forward of a captured step holds {len(present)} requests, "
                f"{len(marked)} of them this run's; its statistics would belong to no sample. Let "
                "nothing else ask the rollout's server, or switch actor_infer_dump off"
            )
        mark, request = marked[0]
        first, last = given[0].capture.token_range or (0, -1)
        if not mark.phase and not first <= request.token <= last:
            return call()
        self._inside = True
        try:
            return self._captured(mark, request, model, call)
        finally:
            self._inside = False

    def _captured(
        self, mark: marks.Mark, request: Request, model: Any, call: Callable[[], Any]
    ) -> Any:
        if not isinstance(model, nn.Module):
            raise HookError(
                f"{self._engine} runs its model as {type(model).__name__}, in which no module's "
                "hooks run; set actor_rollout_ref.rollout.enforce_eager=true"
            )
        stage = stages.FORCED if mark.phase else stages.GENERATE
        with self._recorder(stage).stage(
            stage, mark.step, mark.trainer_step, model, chosen_forwards=True
        ) as scope:
            scope.micro_step(mark.number)
            scope.request = mark.request
            if mark.phase:
                prompt = mark.phase == forcing.DECODE and request.token == 0
                scope.forward = (forcing.PROMPT if prompt else mark.phase, request.token)
            result = call()
        if scope.captured and scope.calls == 0:
            raise HookError(
                f"{self._engine}: no module's hooks ran in a forward: it was compiled or is a "
                "graph; set actor_rollout_ref.rollout.enforce_eager=true"
            )
        return result

    def _digest(self, mark: marks.Mark, model: Any) -> None:
        """Leave what the weights are that a step generates with; graphs hide nothing of them."""
        if isinstance(model, nn.Module):
            self._recorder(stages.GENERATE).digest(stages.GENERATE, mark.step, model)

    def _recorder(self, stage: str) -> Recorder:
        if stage not in self._recorders:
            self._recorders[stage] = self._make(stage)
        return self._recorders[stage]

    def _make(self, stage: str) -> Recorder:
        given = handover.taken()
        assert given is not None
        session, replica = given
        # what the process may write is for both of its stages
        self._budget = self._budget or Budget(session)
        rank = _rank()
        # one replica is led through responses, whichever it is: the other side's may be another
        first = 0 if stage == stages.FORCED else replica.number * replica.world_size
        return Recorder(
            session,
            role=ROLE,
            rank=first + rank,
            world_size=replica.world_size,
            budget=self._budget,
            layout={
                "backend": self._engine,
                "tp": replica.tp,
                "pp": replica.pp,
                "dp": 1,
                "tp_rank": rank % replica.tp,
                "pp_rank": rank // replica.tp,
            },
        )


def _rank() -> int:
    """Of this process within its replica; both engines put tensor parallelism innermost."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    return int(distributed.get_rank())
