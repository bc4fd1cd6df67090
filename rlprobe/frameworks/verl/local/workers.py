"""verl's worker groups without Ray: rank 0 lives in this process, every other in a fork of it.

The group binds verl's own worker methods with verl's own dispatch and collect functions, so data
are split over ranks and gathered as always; only the call itself is direct (rank 0) or goes over a
pipe. Arguments and results are pickled as Ray would pickle them: a worker never shares a tensor
with the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray.base import _unwrap_ray_remote

from rlprobe.errors import RunError
from rlprobe.frameworks.verl import control


def _copied(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))


class _Rank:
    """The workers of one rank, by role: what verl colocates in one process."""

    def __init__(self, rank: int, world_size: int, rendezvous: Path) -> None:
        self._workers: dict[str, Any] = {}
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
            DIST_INIT_METHOD=f"file://{rendezvous}",
        )

    def create(self, key: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._workers[key] = cls(*args, **kwargs)

    def call(self, key: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = getattr(self._workers[key], method)(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result


class _RandomStreams:
    """The random state of rank 0's workers, kept apart from the driver's in the same process."""

    def __init__(self) -> None:
        self._kept = self._now()

    @staticmethod
    def _now() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _set(state: tuple[Any, ...]) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        outside = self._now()
        self._set(self._kept)
        try:
            yield
        finally:
            self._kept = self._now()
            self._set(outside)


class Ranks:
    """All training processes of a run.

    Construct it before any process group or thread exists: the other ranks are forked here.

    Args:
        world_size: number of ranks.
        values: what the driver publishes; it travels with every call to another rank.
    """

    def __init__(self, world_size: int, values: dict[str, Any]) -> None:
        self.world_size = world_size
        self._values = values
        # gloo meets through a file: a port could be taken between its choice and its use
        self._rendezvous = Path(tempfile.mkdtemp(prefix="rlp-"), "gloo")
        self._others: list[tuple[int, Connection]] = []
        for rank in range(1, world_size):
            self._others.append(self._fork(rank))
        self._first = _Rank(0, world_size, self._rendezvous)
        self._random = _RandomStreams()

    def _fork(self, rank: int) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, ours
        # Ranks forked before this one end when the last copy of their pipe is closed.
        for pipe in (ours, *(pipe for _, pipe in self._others)):
            pipe.close()
        status = 1
        try:
            _serve(_Rank(rank, self.world_size, self._rendezvous), theirs)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def create(self, key: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the workers of one role on every rank."""
        self._all("create", [(key, cls, args, kwargs)] * self.world_size)

    def call(
        self, key: str, method: str, args: list[tuple[Any, ...]], kwargs: list[dict[str, Any]]
    ) -> list[Any]:
        """Call a role's method on every rank at once; results in the order of ranks.

        Args:
            key: the role.
            method: name of the worker's method.
            args: positional arguments per rank.
            kwargs: keyword arguments per rank.

        Raises:
            RunError: another rank's process failed; its traceback is in the message.
        """
        return self._all("call", [(key, method, a, k) for a, k in zip(args, kwargs, strict=True)])

    def _all(self, what: str, requests: list[tuple[Any, ...]]) -> list[Any]:
        for (_, pipe), request in zip(self._others, requests[1:], strict=True):
            pipe.send_bytes(cloudpickle.dumps((what, self._values, request)))
        with self._random():
            results = [_copied(getattr(self._first, what)(*_copied(requests[0])))]
        for rank, (_, pipe) in enumerate(self._others, start=1):
            try:
                error, result = cloudpickle.loads(pipe.recv_bytes())
            except EOFError as ended:
                raise RunError(f"the process of rank {rank} ended without an answer") from ended
            if error is not None:
                raise RunError(f"rank {rank} failed:\n{error}")
            results.append(result)
        return results

    def close(self) -> None:
        """End the other ranks' processes and wait for them."""
        for _, pipe in self._others:
            pipe.close()
        for pid, _ in self._others:
            os.waitpid(pid, 0)
        self._rendezvous.unlink(missing_ok=True)
        self._rendezvous.parent.rmdir()


def _serve(rank: _Rank, pipe: Connection) -> None:
    while True:
        try:
            what, values, request = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        control.use_local(values)
        try:
            answer: tuple[str | None, Any] = (None, getattr(rank, what)(*request))
        except Exception:  # noqa: BLE001  the caller raises it, with this traceback
            answer = (traceback.format_exc(), None)
        pipe.send_bytes(cloudpickle.dumps(answer))


class Completed:
    """A result that is already there, where verl expects one that is awaited with ``get``."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        return self._value


class LocalWorkerGroup(WorkerGroup):
    """One role's workers, called as verl calls a ``RayWorkerGroup``."""

    def __init__(self, ranks: Ranks, key: str, cls: type) -> None:
        super().__init__(resource_pool=None)
        self._ranks = ranks
        self._key = key
        self._workers = list(range(ranks.world_size))
        self._bind_worker_method(cls, _method)

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call on every rank; lists as long as there are ranks hold an argument for each."""
        size = self.world_size
        values = [*args, *kwargs.values()]
        if all(isinstance(value, list) and len(value) == size for value in values):
            per_rank = [tuple(value[i] for value in args) for i in range(size)]
            named = [{name: value[i] for name, value in kwargs.items()} for i in range(size)]
        else:
            per_rank, named = [args] * size, [kwargs] * size
        return self._ranks.call(self._key, method, per_rank, named)

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """verl's interface has it; none of the methods a replay calls uses it."""
        raise RunError(f"{method}: calls to rank 0 alone are not supported without Ray")


def _method(
    group: LocalWorkerGroup,
    name: str,
    dispatch_fn: Callable[..., Any],
    collect_fn: Callable[..., Any],
    execute_fn: Callable[..., Any],
    blocking: bool,
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = dispatch_fn(group, *args, **kwargs)
        result = collect_fn(group, execute_fn(name, *args, **kwargs))
        return result if blocking else Completed(result)

    return call


class ColocatedGroups:
    """Stands in for ``RayWorkerGroup``: makes the workers, one group for each role.

    Args:
        ranks: the training processes.
        classes: verl's ``RayClassWithInitArgs`` by role.
    """

    def __init__(self, ranks: Ranks, classes: dict[str, Any]) -> None:
        self._groups: dict[str, LocalWorkerGroup] = {}
        for key, made in classes.items():
            cls = _unwrap_ray_remote(made.cls)
            ranks.create(key, cls, made.args, made.kwargs)
            self._groups[key] = LocalWorkerGroup(ranks, key, cls)

    def spawn(self, prefix_set: Any) -> dict[str, LocalWorkerGroup]:
        """The groups by role."""
        return {key: self._groups[key] for key in prefix_set}
