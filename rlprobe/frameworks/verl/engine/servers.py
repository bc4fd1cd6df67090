"""verl's vLLM and SGLang servers, where the inference layers are dumped.

A server is a Ray actor: it knows session and step, and its engine's processes do not. It hands
them the session before they start, marks the requests of captured steps, answers those one at a
time (a forward then belongs to one sample, as with the CPU engine), and leaves which sample each
became. Where no layers are dumped, a captured step's first request asks for a digest of the weights
that the engine has, and nothing else changes. Servers of reward models and teachers are left alone.

Written against verl 0.9.1; contract-tested, not run here.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from rlprobe.capture.session import Session
from rlprobe.errors import HookError
from rlprobe.frameworks.engines import handover, marks
from rlprobe.frameworks.engines.forcing import FREE, Asked
from rlprobe.frameworks.verl import control
from rlprobe.frameworks.verl.engine import inference, vllm_forced
from rlprobe.rollouts.digest import sample_digest

#: Of the names of Ray actors that serve another model than the policy.
_OTHERS = ("server_reward_", "server_teacher_")
_MARK = "_rlprobe_wrapped"

_Around = Callable[[Callable[..., Awaitable[Any]], Any, tuple[Any, ...], dict[str, Any]], Any]


def patch(module: ModuleType, class_name: str) -> None:
    """Wrap a server's ``launch_server`` and ``generate``.

    Raises:
        HookError: inference layers are to be dumped, and the class lacks what is wrapped.
    """
    cls = getattr(module, class_name, None)
    hooks: dict[str, _Around] = {"launch_server": around_launch, "generate": around_generate}
    missing = [name for name in hooks if not inspect.iscoroutinefunction(getattr(cls, name, None))]
    if not missing:
        for name, around in hooks.items():
            _wrap(cls, name, around)
    elif inference.wanted(control.session()) or inference.led(control.session()):
        raise HookError(
            f"{class_name} has no coroutine {', '.join(missing)}: inference layers cannot be "
            "dumped; switch actor_infer_dump off"
        )


def _wrap(cls: Any, name: str, around: _Around) -> None:
    original = getattr(cls, name)
    if getattr(original, _MARK, False):
        return

    # Ray runs a method on the actor's event loop only if it is a coroutine function itself
    @functools.wraps(original)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await around(original, self, args, kwargs)

    setattr(wrapper, _MARK, True)
    setattr(cls, name, wrapper)


async def around_launch(
    original: Callable[..., Awaitable[Any]],
    self: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Let the engine's processes know the session before they are started."""
    session = _session()
    if session is not None:
        config = self.config
        replica = handover.Replica(
            number=int(self.replica_rank),
            tp=int(config.tensor_model_parallel_size),
            pp=int(config.pipeline_model_parallel_size),
        )
        handover.give(session, replica)
    return await original(self, *args, **kwargs)


async def around_generate(
    original: Callable[..., Awaitable[Any]],
    self: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Answer a request; in a captured step marked, and none beside it."""
    session = _session()
    if session is None or not session.capture.wants_step(control.step()[0]):
        return await original(self, *args, **kwargs)
    call = inspect.signature(original).bind(self, *args, **kwargs)
    if (asked := Asked.of(call.arguments["sampling_params"])) is not None:
        return await vllm_forced.led(session, self, _served(self).lock, call.arguments, asked)
    free = call.arguments["sampling_params"].pop(FREE, False)
    served = _served(self)
    if free or not inference.wanted(session):
        asked_anyway = free or inference.led(session) or not inference.digested(session)
        if not asked_anyway and served.first_of(control.step()[0]):
            mark = marks.Mark(*control.step(), int(self.replica_rank), 0, marks.WEIGHTS)
            call.arguments["request_id"] = mark.on(str(call.arguments["request_id"]))
        return await original(*call.args, **call.kwargs)
    async with served.lock:
        step, trainer_step = control.step()
        number = served.next(step)
        mark = marks.Mark(step, trainer_step, int(self.replica_rank), number)
        call.arguments["request_id"] = mark.on(str(call.arguments["request_id"]))
        output = await original(*call.args, **call.kwargs)
    prompt = [int(token) for token in call.arguments["prompt_ids"]]
    digest = sample_digest(prompt, [int(token) for token in output.token_ids])
    handover.joined(session, mark.replica, mark.request, digest)
    return output


class _Served:
    """What a server has answered in a captured step."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._step: int | None = None
        self._count = 0
        self._digested: int | None = None

    def first_of(self, step: int) -> bool:
        """Whether nothing of a step was asked for before."""
        first = step != self._digested
        self._digested = step
        return first

    def next(self, step: int) -> int:
        """The number of the next request of a step, from 0."""
        if step != self._step:
            self._step, self._count = step, 0
        self._count += 1
        return self._count - 1


def _served(server: Any) -> _Served:
    found: _Served | None = server.__dict__.get("_rlprobe_served")
    if found is None:
        found = server._rlprobe_served = _Served()
    return found


def _session() -> Session | None:
    """The session, where it records something of this server's engine."""
    session = control.session()
    asks = (inference.wanted, inference.led, inference.digested)
    if session is None or not any(asked(session) for asked in asks):
        return None
    import ray

    name = ray.get_runtime_context().get_actor_name() or ""
    return None if any(other in name for other in _OTHERS) else session
