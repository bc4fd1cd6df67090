"""The training actors' side: each stage is recorded around slime's own functions.

``compute_log_prob`` is a stage of its own, told by ``store_prefix``; ``train`` and, in a critic,
``forward_only`` are functions that actor.py imported from model.py, told by the actor that runs.
One model object serves the policy, its old copy, the reference and a teacher: slime exchanges the
weights in place before each of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rlprobe import stages
from rlprobe.capture import configurations, determinism, megatron_layout, perturbed
from rlprobe.capture.joining import Joining
from rlprobe.capture.names import unwrap
from rlprobe.capture.session import Session
from rlprobe.faults.declare import Site
from rlprobe.faults.plant import planted, reference_of
from rlprobe.frameworks import progress
from rlprobe.frameworks.slime import (
    batch,
    cached,
    control,
    metrics,
    plan,
    precision,
    rollout_key_data,
    running,
    updates,
)
from rlprobe.frameworks.slime.recorder import SlimeRecorder
from rlprobe.frameworks.slime.running import Running, argument

_STAGE_OF_PREFIX = {
    "ref_": stages.REFERENCE,
    "": stages.LOG_PROB,
    "teacher_": stages.TEACHER,
}
#: Models that slime keeps beside the one that it trains, in whose place they are put.
_UNTRAINED = (stages.REFERENCE, stages.TEACHER)
_recorders: dict[str, SlimeRecorder] = {}
_joining: Joining | None = None


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
    configured = argument(original, "args", (self, *args), kwargs)
    precision.require(configured)
    result = original(self, *args, **kwargs)
    role = argument(original, "role", (self, *args), kwargs)
    if session.capture.configurations and role == "actor" and running.rank() == 0:
        configurations.write(session, {"slime": vars(configured)})
    return result


def build(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """slime's ``initialize_model_and_optimizer``; then a perturbed control's weights move."""
    result = original(*args, **kwargs)
    session = control.session()
    if session is not None and session.perturbed:
        model, optimizer = result[:2]
        perturbed.disturb(model, session.perturbed, session.precision, optimizer)
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
    session = control.session()
    if session is None:
        return original(self, *args, **kwargs)
    rollout_id = int(argument(original, "rollout_id", (self, *args), kwargs))
    data = argument(original, "rollout_data", (self, *args), kwargs)
    metrics.enter(rollout_id)
    here = Running(self, role, rollout_id, data)
    running.begin(here)
    try:
        result = original(self, *args, **kwargs)
        _after_rollout(session, here)
    finally:
        running.end()
    return result


def _after_rollout(session: Session, here: Running) -> None:
    step = control.step(here.rollout_id)
    if not session.capture.wants_step(step):
        return
    rollout_key_data.write(session, here, step)
    wanted = here.role == "actor" and stages.LOG_PROB in session.capture.stages
    if wanted and stages.LOG_PROB not in here.done and running.rank() == 0:
        sys.stderr.write(
            f"rlprobe: step {step}: slime did not run old_log_prob, so this stage does not exist "
            f"in this run. slime runs it only with {plan.FORCES_OLD_LOG_PROB}\n"
        )


def around_compute_log_prob(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Log-probs of the reference, the policy or a teacher."""
    session, here = control.session(), running.now()
    if session is None or here is None:
        return original(self, *args, **kwargs)
    prefix = argument(original, "store_prefix", (self, *args), kwargs)
    stage = _STAGE_OF_PREFIX.get(prefix)
    if stage is None:
        sys.stderr.write(
            f"rlprobe: log-probs stored as {prefix!r} are no stage it knows; left alone\n"
        )
        return original(self, *args, **kwargs)
    return _stage(session, here, stage, self.model, None, lambda: original(self, *args, **kwargs))


def forward_only(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A critic's values; the policy's forward passes are inside ``compute_log_prob``."""
    session, here = control.session(), running.now()
    if session is None or here is None or here.role != "critic":
        return original(*args, **kwargs)
    model = argument(original, "model", args, kwargs)
    return _stage(session, here, stages.VALUES, model, None, lambda: original(*args, **kwargs))


def train(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The update of the policy or of the critic: all train steps of one rollout."""
    session, here = control.session(), running.now()
    if session is None or here is None:
        return original(*args, **kwargs)
    iterators = argument(original, "data_iterator", args, kwargs)
    here.iterator = iterators[0] if iterators else None
    stage = stages.CRITIC_UPDATE if here.role == "critic" else stages.ACTOR_UPDATE
    optimizer = argument(original, "optimizer", args, kwargs)

    def call() -> Any:
        with updates.watched(optimizer):
            return original(*args, **kwargs)

    model = argument(original, "model", args, kwargs)
    return _stage(session, here, stage, model, optimizer, call)


def _stage(
    session: Session,
    here: Running,
    stage: str,
    model: Any,
    optimizer: Any,
    call: Callable[[], Any],
) -> Any:
    step = control.step(here.rollout_id)
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    bare = [unwrap(chunk)[1] for chunk in chunks]
    role, rank = stages.MODEL_ROLE[stage], running.rank()
    site = Site(
        role=role,
        stage=stage,
        step=step,
        model=bare[0] if len(bare) == 1 else bare,
        optimizer=optimizer,
        batch=here.rollout_data,
        rank=rank,
        world_size=running.world_size(),
        config=here.actor.args,
        strength=session.fault_strength,
    )
    if stage not in _UNTRAINED:
        _join(session, role, step, chunks, here.actor)
    recorder = _recorder(session, role, chunks)
    if session.capture.engine == "msprobe" and recorder.wants(stage, step):
        cached.forget(chunks)
    started = time.monotonic()
    if rank == 0:
        progress.report(session, stage, step, here.rollout_id)
    with (
        planted(reference_of(session.fault), site, session.fault_step),
        recorder.stage(stage, step, here.rollout_id, chunks, optimizer=optimizer) as scope,
    ):
        scope.samples(batch.digests(here.rollout_data))
        scope.given(here.rollout_data)
        # a dump under msprobe's own configuration is msprobe's alone: no losses, no gradients
        here.scope = None if session.role == "collector" else scope
        try:
            result = call()
        finally:
            here.scope = None
    here.done.add(stage)
    if rank == 0:
        progress.report(session, stage, step, here.rollout_id, time.monotonic() - started)
    return result


def _join(session: Session, role: str, step: int, chunks: list[Any], actor: Any) -> None:
    """Keep or take over the state of what is trained, once a captured step has put it in place.

    Before its first stage of the step, and not when the step begins: the reference may be in the
    model then.
    """
    global _joining
    if _joining is None:
        _joining = Joining(session, running.rank(), running.world_size())
    _joining.enter(role, step, chunks, getattr(actor, "optimizer", None))


def _recorder(session: Session, role: str, chunks: list[Any]) -> SlimeRecorder:
    recorder = _recorders.get(role)
    if recorder is None:
        recorder = _recorders[role] = SlimeRecorder(
            session,
            role=role,
            rank=running.rank(),
            world_size=running.world_size(),
            layout=megatron_layout.layout(chunks),
        )
    return recorder
