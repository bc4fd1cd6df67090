"""The workers' side: each stage is recorded around verl's own method.

The outermost wrapped method names the stage; the ones verl calls inside it pass straight through.
Micro batches, losses and gradients are seen at the engine, wrapped per instance, because on the
newer trainer the outer methods get a reference to the batch and not the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

from rlprobe import stages
from rlprobe.capture import determinism, megatron_layout, names, perturbed
from rlprobe.capture.joining import Joining
from rlprobe.capture.recorder import Recorder, StageScope
from rlprobe.capture.session import Session
from rlprobe.faults.declare import Site
from rlprobe.faults.plant import planted, reference_of
from rlprobe.frameworks import progress
from rlprobe.frameworks.stepping import stepping
from rlprobe.frameworks.verl import batch, control, megatron, wide

_recorders: dict[str, Recorder] = {}
_joining: Joining | None = None


@dataclasses.dataclass
class _Stage:
    """The stage running in this process."""

    name: str
    step: int
    scope: StageScope
    #: Whether this step's key data and samples are wanted.
    wanted: bool
    #: Whether this is a run of an alignment, and not the vendor's collector.
    aligning: bool
    micro_steps: int = 0
    #: Number of the first micro-batch of the batch at work.
    first: int = 0


_running: list[_Stage] = []

#: The latest step with a log-prob stage in this process.
_log_prob_step: int | None = None

_STAGE_OF_METHOD = {
    "compute_log_prob": stages.LOG_PROB,
    "compute_ref_log_prob": stages.REFERENCE,
    "update_actor": stages.ACTOR_UPDATE,
}
_STAGE_OF_CRITIC_METHOD = {
    "infer_batch": stages.VALUES,
    "train_mini_batch": stages.CRITIC_UPDATE,
    "train_batch": stages.CRITIC_UPDATE,
}


def around_stage(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a worker method as a stage if it is one and none is running."""
    session = control.session()
    if session is None or _running:
        return original(self, *args, **kwargs)
    data = kwargs.get("data", args[0] if args else None)
    stage = _stage(self, original.__name__, data)
    if stage is None:
        return original(self, *args, **kwargs)
    return _run(session, stage, self, data, lambda: original(self, *args, **kwargs))


def _stage(worker: Any, method: str, data: Any) -> str | None:
    # a LoRA actor is its own reference: the second log-prob call runs without the adapter. The
    # flag must be read before the call, which takes it out of the batch.
    if method == "compute_log_prob" and batch.flag(data, "no_lora_adapter", False):
        return stages.REFERENCE
    if method in _STAGE_OF_METHOD:
        return _STAGE_OF_METHOD[method]
    if getattr(getattr(worker, "config", None), "model_type", None) == "value_model":
        return _STAGE_OF_CRITIC_METHOD.get(method)
    return None


def _run(session: Session, stage: str, worker: Any, data: Any, call: Callable[[], Any]) -> Any:
    global _log_prob_step
    adapterless = bool(batch.flag(data, "no_lora_adapter", False))
    engine = _engine(worker, stage, adapterless)
    role = "actor" if adapterless else stages.MODEL_ROLE[stage]
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    step, trainer_step = control.step()
    _join(session, role, step, rank, world_size, engine)
    optimizer = getattr(engine, "optimizer", None) if stage in stages.UPDATE_STAGES else None
    site = Site(
        role=role,
        stage=stage,
        step=step,
        model=_bare(engine.module),
        optimizer=optimizer,
        batch=data,
        rank=rank,
        world_size=world_size,
        config=getattr(worker, "config", None),
        strength=session.fault_strength,
    )
    recorder = _recorder(session, role, rank, world_size, engine)
    with (
        planted(reference_of(session.fault), site, session.fault_step),
        recorder.stage(
            stage,
            step,
            trainer_step,
            engine.module,
            optimizer=optimizer,
            adapter=_adapter(engine, adapterless),
        ) as scope,
    ):
        wanted, aligning = session.capture.wants_step(step), session.role != "collector"
        scope.given(dict(batch.tensors(data)))
        _running.append(_Stage(stage, step, scope, wanted, aligning))
        if stage == stages.LOG_PROB:
            _log_prob_step = step
        began = time.monotonic()
        if rank == 0:
            progress.report(session, stage, step, trainer_step)
        samples = batch.sample_digests(data) if wanted and aligning else []
        try:
            result = call()
            if samples:
                _hands_back(_running[-1], samples, result)
            return result
        finally:
            _running.pop()
            if rank == 0:
                progress.report(session, stage, step, trainer_step, time.monotonic() - began)


def _join(session: Session, role: str, step: int, rank: int, world_size: int, engine: Any) -> None:
    """Keep or take over the model's state where a captured step begins."""
    global _joining
    if _joining is None:
        _joining = Joining(session, rank, world_size)
    _joining.enter(role, step, engine.module, getattr(engine, "optimizer", None))


def _bare(module: Any) -> Any:
    """The model that a fault is planted in: Megatron's chunks come in wrappers, in a list."""
    if not isinstance(module, (list, tuple)):
        return module
    chunks = [names.unwrap(chunk)[1] for chunk in module]
    return chunks[0] if len(chunks) == 1 else chunks


def _engine(worker: Any, stage: str, adapterless: bool) -> Any:
    if not hasattr(worker, "actor"):
        return worker.engine
    part = worker.ref if stage == stages.REFERENCE and not adapterless else worker.actor
    return part.engine


def _adapter(engine: Any, adapterless: bool) -> bool | None:
    """Whether a LoRA adapter is active; None for a model without one."""
    chunks = engine.module if isinstance(engine.module, list) else [engine.module]
    has_adapter = any("lora_" in name for m in chunks for name, _ in m.named_parameters())
    return not adapterless if has_adapter else None


def _recorder(session: Session, role: str, rank: int, world_size: int, engine: Any) -> Recorder:
    recorder = _recorders.get(role)
    if recorder is None:
        recorder = _recorders[role] = Recorder(
            session,
            role=role,
            rank=rank,
            world_size=world_size,
            layout={
                "backend": type(engine).__name__,
                "dp": engine.get_data_parallel_size(),
                "dp_rank": engine.get_data_parallel_rank(),
                **megatron_layout.layout(engine.module),
            },
        )
        recorder.left = None if _joining is None else _joining.left
    return recorder


def around_reset(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Seed before the model is built, then watch the engine's micro batches and updates.

    Of a perturbed control the weights are disturbed once they are there.
    """
    session = control.session()
    if session is None:
        return original(self, *args, **kwargs)
    determinism.apply(session)
    result = original(self, *args, **kwargs)
    if session.perturbed:
        optimizer = getattr(self.engine, "optimizer", None)
        perturbed.disturb(self.engine.module, session.perturbed, session.precision, optimizer)
    _watch(self.engine)
    return result


def _watch(engine: Any) -> None:
    """Wrap this engine's methods as instance attributes: no class of verl's is touched."""
    if getattr(engine, "_rlprobe_watched", False):
        return
    engine._rlprobe_watched = True
    if megatron.is_megatron(engine):
        megatron.watch(engine, _megatron_begins, _megatron_ends)
    else:
        _watch_forward(engine)
    train_batch = engine.train_batch
    infer_batch = engine.infer_batch
    optimizer_step = engine.optimizer_step

    @functools.wraps(optimizer_step)
    def watched_optimizer_step(*args: Any, **kwargs: Any) -> Any:
        stage = _wanted_stage()
        if stage is None:
            return optimizer_step(*args, **kwargs)
        scope = stage.scope
        if megatron.is_megatron(engine):
            own = engine.optimizer

            def prepared() -> None:
                scope.gradients("grad_reduced", own)
                scope.gradient_norms(own)

            def ready() -> None:
                scope.gradients("grad_clipped", own)
                scope.settings(own)

            with stepping(own, prepared, ready):
                norm = optimizer_step(*args, **kwargs)
            scope.total_norm(norm)
            return norm
        scope.gradients("grad_reduced")
        scope.gradient_norms(engine.optimizer)

        def stepped(*_: Any) -> None:
            scope.gradients("grad_clipped")
            scope.settings(engine.optimizer)

        # verl clips inside this method; the optimizer's own pre-hook sees the clipped gradients
        handle = engine.optimizer.register_step_pre_hook(stepped)
        try:
            norm = optimizer_step(*args, **kwargs)
        finally:
            handle.remove()
        scope.total_norm(norm)
        return norm

    def watched_batch(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(data: Any, *args: Any, **kwargs: Any) -> Any:
            stage = _wanted_stage()
            if stage is not None:
                stage.first = stage.micro_steps
                stage.scope.samples(batch.sample_digests(data))
            return call(data, *args, **kwargs)

        return wrapper

    engine.optimizer_step = watched_optimizer_step
    engine.train_batch = watched_batch(train_batch)
    engine.infer_batch = watched_batch(infer_batch)


def _watch_forward(engine: Any) -> None:
    forward_step = engine.forward_step

    @functools.wraps(forward_step)
    def watched_forward_step(*args: Any, **kwargs: Any) -> Any:
        stage = _wanted_stage()
        if stage is None:
            with wide.around(engine):
                return forward_step(*args, **kwargs)
        _begins(stage, stage.micro_steps, kwargs.get("micro_batch", args[0] if args else None))
        stage.micro_steps += 1
        with wide.around(engine):
            loss, output = forward_step(*args, **kwargs)
        _ends(stage, loss, output)
        return loss, output

    engine.forward_step = watched_forward_step


def _begins(stage: _Stage, number: int, micro_batch: Any) -> None:
    """A micro-batch begins: what it is given is key data."""
    stage.scope.micro_step(number)
    stage.scope.tokens(batch.token_ids(micro_batch))
    if stage.name != stages.LOG_PROB:  # there the tokens themselves are key data
        stage.scope.rows(batch.sample_digests(micro_batch), number)
    bypassed = _log_prob_step != stage.step
    for name, value in batch.key_inputs(stage.name, micro_batch, stage.aligning, bypassed):
        stage.scope.key_data(name, value)


def _ends(stage: _Stage, loss: Any, output: Any, number: int | None = None) -> None:
    """A micro-batch has its outputs and its loss (``number`` None: it is the current one)."""
    for name, value in batch.key_outputs(stage.name, output.get("model_output"), stage.aligning):
        stage.scope.key_data(name, value, number)
    if stage.name in stages.UPDATE_STAGES:
        stage.scope.loss("loss", loss)
        for name, value in batch.loss_parts(output.get("metrics")):
            stage.scope.loss(name, value)


def _hands_back(stage: _Stage, samples: list[str], result: Any) -> None:
    """A stage is through: its results stand behind those of its micro-batches."""
    number = stage.micro_steps
    stage.scope.rows(samples, number)
    for name, value in batch.handed(stage.name, result):
        stage.scope.key_data(name, value, number)


def _megatron_begins(number: int, micro_batch: Any, first: bool) -> None:
    stage = _wanted_stage()
    if stage is None:
        return
    stage.micro_steps = max(stage.micro_steps, stage.first + number + 1)
    if first:
        _begins(stage, stage.first + number, micro_batch)
    else:
        stage.scope.micro_step(stage.first + number)
        stage.scope.tokens(batch.token_ids(micro_batch))


def _megatron_ends(number: int, loss: Any, output: Any) -> None:
    stage = _wanted_stage()
    if stage is not None:
        _ends(stage, loss, output, stage.first + number)


def _wanted_stage() -> _Stage | None:
    """The running stage, in a step that is captured."""
    stage = _running[-1] if _running else None
    return stage if stage is not None and stage.wanted else None
