"""The training actors' side: each stage is recorded around slime's own functions.

``compute_log_prob`` is a stage of its own, told by ``store_prefix``; ``train`` and, in a critic,
``forward_only`` are functions that actor.py imported from model.py, told by the actor that runs.
One model object serves the policy, its old copy, the reference and a teacher: slime exchanges the
weights in place before each of them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlprobe import stages
from rlprobe.capture import configurations, determinism, key_data
from rlprobe.capture.names import unwrap
from rlprobe.capture.recorder import StageScope
from rlprobe.capture.session import Session
from rlprobe.frameworks import progress
from rlprobe.frameworks.slime import batch, control, layout, metrics, train_data
from rlprobe.frameworks.slime.recorder import SlimeRecorder
from rlprobe.selftest.declare import Site
from rlprobe.selftest.plant import planted, reference_of

_STAGE_OF_PREFIX = {
    "ref_": stages.REFERENCE,
    "": stages.LOG_PROB,
    "teacher_": stages.TEACHER,
}


@dataclass
class _Running:
    """The rollout that an actor trains on."""

    actor: Any
    role: str
    rollout_id: int
    rollout_data: dict[str, Any]
    done: set[str] = field(default_factory=set)
    #: The stage under way; stages never nest.
    scope: StageScope | None = None


_running: _Running | None = None
_recorders: dict[str, SlimeRecorder] = {}


def argument(original: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """An argument by name, wherever the call and this version's signature put it."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


def around_init(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Seed before the model is built."""
    session = control.session()
    if session is None:
        return original(self, *args, **kwargs)
    if session.role == "collector":
        from msprobe.pytorch import seed_all

        seed_all(mode=True)
    else:
        determinism.apply(session)
    result = original(self, *args, **kwargs)
    configured = argument(original, "args", (self, *args), kwargs)
    role = argument(original, "role", (self, *args), kwargs)
    if session.capture.configurations and _rank() == 0 and role == "actor":
        configurations.write(session, {"slime": _plain(vars(configured))})
    return result


def around_train_actor(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One rollout of the policy, from log-probs to the update."""
    return _rollout("actor", original, self, args, kwargs)


def around_train_critic(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One rollout of the critic, values and update."""
    return _rollout("critic", original, self, args, kwargs)


def _rollout(
    role: str, original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    global _running
    session = control.session()
    if session is None:
        return original(self, *args, **kwargs)
    rollout_id = int(argument(original, "rollout_id", (self, *args), kwargs))
    data = argument(original, "rollout_data", (self, *args), kwargs)
    metrics.enter(rollout_id)
    _running = running = _Running(self, role, rollout_id, data)
    try:
        result = original(self, *args, **kwargs)
        _after_rollout(session, running)
        return result
    finally:
        _running = None


def _after_rollout(session: Session, running: _Running) -> None:
    step = control.step(running.rollout_id)
    if not session.capture.wants_step(step):
        return
    _key_data(session, running, step)
    absent = running.role == "actor" and stages.LOG_PROB not in running.done
    if absent and stages.LOG_PROB in session.capture.stages and _rank() == 0:
        from rlprobe.frameworks.slime import plan

        sys.stderr.write(
            f"rlprobe: step {step}: slime did not run old_log_prob, so this stage does not exist "
            f"in this run. slime runs it only with {plan.FORCES_OLD_LOG_PROB}\n"
        )


def around_compute_log_prob(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Log-probs of the reference, the policy or a teacher."""
    session = control.session()
    if session is None or _running is None:
        return original(self, *args, **kwargs)
    prefix = argument(original, "store_prefix", (self, *args), kwargs)
    stage = _STAGE_OF_PREFIX.get(prefix)
    if stage is None:
        sys.stderr.write(f"rlprobe: log-probs stored as {prefix!r} are no known stage; left alone\n")
        return original(self, *args, **kwargs)
    return _stage(session, stage, self.model, None, lambda: original(self, *args, **kwargs))


def forward_only(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A critic's values; the policy's forward passes are inside ``compute_log_prob``."""
    session = control.session()
    if session is None or _running is None or _running.role != "critic":
        return original(*args, **kwargs)
    model = argument(original, "model", args, kwargs)
    return _stage(session, stages.VALUES, model, None, lambda: original(*args, **kwargs))


def train(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The update of the policy or of the critic: all train steps of one rollout."""
    session = control.session()
    if session is None or _running is None:
        return original(*args, **kwargs)
    stage = stages.CRITIC_UPDATE if _running.role == "critic" else stages.ACTOR_UPDATE
    model = argument(original, "model", args, kwargs)
    optimizer = argument(original, "optimizer", args, kwargs)

    def call() -> Any:
        restore = _watch_optimizer(optimizer)
        try:
            return original(*args, **kwargs)
        finally:
            restore()

    return _stage(session, stage, model, optimizer, call)


def loss_function(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A micro-batch's loss and the parts that slime reports of it."""
    result = original(*args, **kwargs)
    scope = _scope()
    if scope is not None:
        scope.loss("loss", result[0])
        report = result[2] if len(result) > 2 else {}
        values = report.get("values")
        # the first value is the number of samples or tokens, the others belong to the keys
        if isinstance(values, torch.Tensor):
            for name, value in zip(report.get("keys", ()), values.detach()[1:], strict=False):
                scope.loss(str(name), value)
    return result


def _scope() -> StageScope | None:
    scope = _running.scope if _running is not None else None
    return scope if scope is not None and scope.captured else None


def _stage(
    session: Session, stage: str, model: Any, optimizer: Any, call: Callable[[], Any]
) -> Any:
    running = _running
    assert running is not None
    rollout_id, step = running.rollout_id, control.step(running.rollout_id)
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    bare = [unwrap(chunk)[1] for chunk in chunks]
    rank, world_size = _rank(), _world_size()
    site = Site(
        role=stages.MODEL_ROLE[stage],
        stage=stage,
        step=step,
        model=bare[0] if len(bare) == 1 else bare,
        optimizer=optimizer,
        batch=running.rollout_data,
        rank=rank,
        world_size=world_size,
        config=running.actor.args,
        strength=session.fault_strength,
    )
    recorder = _recorder(session, stages.MODEL_ROLE[stage], rank, world_size)
    started = time.monotonic()
    if rank == 0:
        progress.report(session, stage, step, rollout_id)
    with (
        planted(reference_of(session.fault), site),
        recorder.stage(stage, step, rollout_id, chunks, optimizer=optimizer) as scope,
    ):
        scope.samples(batch.digests(running.rollout_data))
        running.scope = scope
        try:
            result = call()
        finally:
            running.scope = None
    running.done.add(stage)
    if rank == 0:
        progress.report(session, stage, step, rollout_id, time.monotonic() - started)
    return result


def _recorder(session: Session, role: str, rank: int, world_size: int) -> SlimeRecorder:
    recorder = _recorders.get(role)
    if recorder is None:
        recorder = _recorders[role] = SlimeRecorder(
            session, role=role, rank=rank, world_size=world_size, layout=layout.layout()
        )
    return recorder


def _watch_optimizer(optimizer: Any) -> Callable[[], None]:
    """See the gradients as this optimizer does, before and after clipping; returns the undoing.

    With a distributed optimizer on several ranks a rank holds the sum of its own shard only, so
    there the gradients are left out rather than recorded wrong.
    """
    if _scope() is None or layout.data_parallel_size() > 1:
        return lambda: None
    step, ready = optimizer.step, getattr(optimizer, "step_with_ready_grads", None)

    @functools.wraps(step)
    def watched_step(*args: Any, **kwargs: Any) -> Any:
        scope = _scope()
        if scope is not None:
            scope.gradients("grad_reduced")
        return step(*args, **kwargs)

    def watched_ready(*args: Any, **kwargs: Any) -> Any:
        scope = _scope()
        if scope is not None:
            scope.gradients("grad_clipped")
        return ready(*args, **kwargs)  # type: ignore[misc]

    optimizer.step = watched_step
    # with half-precision parameters, clipping changes the fp32 copies and not what modules hold
    clips_in_place = ready is not None and not _keeps_copies(optimizer)
    if clips_in_place:
        optimizer.step_with_ready_grads = watched_ready

    def restore() -> None:
        del optimizer.step
        if clips_in_place:
            del optimizer.step_with_ready_grads

    return restore


def _keeps_copies(optimizer: Any) -> bool:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return any(type(part).__name__ != "FP32Optimizer" for part in parts)


def _key_data(session: Session, running: _Running, step: int) -> None:
    """Key data of the rollout: from slime's own dump where it gathers shards, else from memory."""
    options, rank = session.capture, _rank()
    if not options.key_data:
        return
    names = batch.ACTOR_KEYS if running.role == "actor" else batch.CRITIC_KEYS
    root = Path(session.dump)

    def put(name: str, rank: int, index: int, rows: list[Any]) -> None:
        if options.wants_rank(rank):
            key_data.write(root, name, step, rank, index, rows)

    path = None
    if running.role == "actor":
        configured = getattr(running.actor.args, "save_debug_train_data", None)
        path = train_data.find(configured, running.rollout_id, rank)
    if path is not None and train_data.is_gathered(path):
        for shard, schedule, columns in train_data.shards(path):
            _micro_steps(columns, names, schedule, functools.partial(_to, put, shard))
        return
    if configured_gathers(running):
        return  # another rank's file has this one's samples
    schedule = _schedule(running)
    _micro_steps(running.rollout_data, names, schedule, functools.partial(_to, put, rank))


def _to(put: Callable[..., None], rank: int, name: str, index: int, rows: list[Any]) -> None:
    put(name, rank, index, rows)


def configured_gathers(running: _Running) -> bool:
    """Whether slime's train-data dump, written by one rank for all, holds this rank's samples."""
    module = sys.modules.get("slime.observability.train_data_utils")
    configured = getattr(running.actor.args, "save_debug_train_data", None)
    return running.role == "actor" and configured is not None and module is not None


def _micro_steps(
    data: dict[str, Any],
    names: dict[str, str],
    schedule: list[list[int]],
    put: Callable[[str, int, list[Any]], None],
) -> None:
    with_tokens = names is batch.ACTOR_KEYS
    for index, rows in enumerate(schedule):
        if with_tokens:
            for name, values in batch.tokens(data, rows):
                put(name, index, values)
        for name, values in batch.key_data(data, names, rows):
            put(name, index, values)


def _schedule(running: _Running) -> list[list[int]]:
    schedule = running.rollout_data.get("micro_batch_indices")
    if schedule is not None:
        return [[int(row) for row in rows] for rows in schedule]
    iterator = getattr(running, "iterator", None)
    if iterator is not None:
        return batch.micro_batches(iterator)
    return [list(range(len(running.rollout_data["response_lengths"])))]


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments as JSON can hold them."""
    kept = (str, int, float, bool, type(None))

    def plain(value: Any) -> Any:
        if isinstance(value, kept):
            return value
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        return str(value)

    return {name: plain(value) for name, value in sorted(values.items())}
