"""Recording the stages of one model role in one training process.

A framework's hooks hold a :class:`Recorder` per role and wrap each stage in
``with recorder.stage(...) as scope``. Outside the captured steps, ranks and stages the scope does
nothing at all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlprobe import stages
from rlprobe.capture import (
    buffers,
    dropout,
    key_data,
    megatron_grads,
    memory,
    provenance,
    updates,
    weights,
)
from rlprobe.capture.budget import Budget
from rlprobe.capture.dumpfile import DebugFile, mark_partial
from rlprobe.capture.engine import Engine, StageContext, Tally, Watch
from rlprobe.capture.optimizer_settings import OptimizerSettings
from rlprobe.capture.parts import Parts
from rlprobe.capture.session import CaptureOptions, Session
from rlprobe.capture.trace import exchange, outputs
from rlprobe.capture.trace.again import unseen
from rlprobe.capture.trace.watch import Tracing
from rlprobe.capture.updates import UpdateRecords
from rlprobe.errors import ConfigError


def make_engine(session: Session) -> Engine:
    """The engine an alignment or the vendor's YAML asks for.

    Raises:
        ConfigError: no engine of that name, or options it does not have.
    """
    options = session.capture
    if options.engine == "light":
        from rlprobe.capture.light.engine import LightEngine

        return LightEngine(session)
    if options.engine == "msprobe":
        from rlprobe.capture.msprobe.engine import MsprobeEngine

        return MsprobeEngine(session)
    raise ConfigError(f"capture.engine: accepted are light and msprobe, found {options.engine!r}")


class Recorder:
    """Captures the stages of one role.

    Args:
        session: what is to be captured.
        role: actor, ref or critic.
        rank: of this process among the training processes; 0 without torch.distributed.
        world_size: how many there are.
        layout: parallel sizes (tp, pp, dp, cp, ep) and backend, as far as known.
        budget: of the process and role, where it has another recorder for another stage.

    Raises:
        ConfigError: the capture options contradict each other.
    """

    def __init__(
        self,
        session: Session,
        *,
        role: str,
        rank: int,
        world_size: int,
        layout: dict[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.session = session
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self._layout = layout
        self._parts = Parts(session, role, rank)
        self._engine = make_engine(session)
        self._budget = budget or Budget(session)
        self._introduced = False
        self._described: set[tuple[str, int]] = set()
        self._debug: dict[str, tuple[int, DebugFile]] = {}
        self._optimizer_steps: dict[tuple[str, int], int] = {}
        self._settings: tuple[Any, OptimizerSettings] | None = None
        #: Of the latest stage and step with updates: how many there were, and what they were told.
        self._told: tuple[tuple[str, int], int, list[dict[str, Any]]] | None = None
        self._traces: dict[tuple[str, int], Tracing] = {}
        #: Told of each captured update that is over: role, step and models.
        self.left: Callable[[str, int, list[nn.Module]], None] | None = None

    def wants(self, stage: str, step: int) -> bool:
        """Whether the model layers of this stage and step are captured on this rank."""
        options = self.session.capture
        if not options.wants_step(step) or not options.wants_rank(self.rank):
            return False
        if stage == stages.GENERATE and options.token_range is None:
            return False
        return stage in options.stages

    def digest(self, stage: str, step: int, model: nn.Module) -> None:
        """Record the weights of a stage whose layers are not captured, where weights are at all."""
        options = self.session.capture
        if options.wants_step(step) and options.wants_rank(self.rank):
            self._digest(stage, step, [model])

    @contextlib.contextmanager
    def stage(
        self,
        stage: str,
        step: int,
        trainer_step: int,
        model: nn.Module | list[nn.Module],
        *,
        optimizer: Any = None,
        adapter: bool | None = None,
        chosen_forwards: bool = False,
    ) -> Iterator[StageScope]:
        """Capture the body of the ``with`` as one entry of a stage.

        Args:
            stage: canonical stage name.
            step: counted from 0.
            trainer_step: the trainer's own number of the step.
            model: the module whose layers are captured, or its chunks.
            optimizer: of an update stage, where there is one.
            adapter: whether LoRA adapters are on; None where there are none.
            chosen_forwards: of generation: the body is forwards of the token range only, and all
                of them.

        Raises:
            RunError: the disk budget is spent; everything captured so far is complete.

        An exception of the body leaves the model clean, marks the stage partial and goes on.
        """
        models = list(model) if isinstance(model, (list, tuple)) else [model]
        if not self.wants(stage, step):
            yield StageScope(self, stage, step, models)
            return
        self._budget.require(stage, step)
        self._introduce(step, trainer_step, models)
        started = time.monotonic()
        directory = self.directory(stage, step)
        debug = self._debug_file(stage, step, directory)
        scope = StageScope(self, stage, step, models, debug, optimizer)
        before = self._digest(stage, step, models, optimizer)
        context = StageContext(stage, step, self.rank, directory, chosen_forwards)
        # before the engine's hooks are in place: they see what the module hands on
        with self._grafted(directory, models):
            watch = self._engine.watch(context, models)
            scope._watch = watch
            scope._trace = self._tracing(context, models)
            try:
                with memory.recording(self.session, stage, step, self.rank), scope._traced():
                    yield scope
            except BaseException:
                watch.abort()
                mark_partial(directory)
                raise
        tally = watch.finish()
        scope._watch = None
        scope.calls = tally.calls
        records = tally.records + scope._publish(before)
        common = {"step": step, "stage": stage, "role": self.role, "rank": self.rank}
        self._parts.lines("gradients", [{**common, **place} for place in scope._places()])
        self._budget.spend(directory)
        self._parts.line(
            "captured",
            {
                "step": step,
                "trainer_step": trainer_step,
                "stage": stage,
                "rank": self.rank,
                "role": self.role,
                "engine": self._engine.name,
                "records": records,
                "calls": tally.calls,
                "seconds": round(time.monotonic() - started, 6),
                "adapter": adapter,
                **({"samples": scope.generated} if scope.generated else {}),
                **({"request": scope.request} if scope.request else {}),
                **({"forward": list(scope.forward)} if scope.forward else {}),
            },
        )

    def _tracing(self, context: StageContext, models: list[nn.Module]) -> Tracing | None:
        """The operators' trace of a stage and step, over all its entries."""
        if self.session.capture.trace is None:
            return None
        if context.key not in self._traces:
            self._traces = {context.key: Tracing(context, models, self.session.capture)}
        return self._traces[context.key]

    def _grafted(self, directory: Path, models: list[nn.Module]) -> contextlib.ExitStack:
        """A module's outputs are kept, or given out in place of its own, as the options say."""
        options = self.session.capture
        module, budget, only = options.trace_module, options.tensor_budget, options.micro_steps
        grafts = contextlib.ExitStack()
        if options.keep_outputs:
            if module is not None:
                grafts.enter_context(outputs.keeping(models, module, directory, budget))
            each = None if budget is None else budget // max(1, len(options.blocks))
            for block in options.blocks:
                place = directory / outputs.BLOCKS / block
                grafts.enter_context(outputs.keeping(models, block, place, each, only))
        elif options.substitute is not None:
            there = Path(options.substitute)
            if module is not None:
                kept = there.parent / exchange.DIRECTORY
                # before its outputs are others'
                grafts.enter_context(exchange.exchanging(models, module, kept, directory))
                grafts.enter_context(outputs.substituting(models, module, there, directory))
            for block in options.blocks:
                source = there.parent / outputs.BLOCKS / block / outputs.DIRECTORY
                place = directory / outputs.BLOCKS / block
                grafts.enter_context(outputs.substituting(models, block, source, place, only))
        return grafts

    def directory(self, stage: str, step: int) -> Path:
        """``{dump}/{stage}/step{step}/rank{rank}``."""
        return Path(self.session.dump) / stage / f"step{step}" / f"rank{self.rank}"

    def _optimizer_step(self, stage: str, step: int) -> int:
        """The number of this optimizer step, over all entries of the stage in the step."""
        number = self._optimizer_steps.get((stage, step), -1) + 1
        self._optimizer_steps = {(stage, step): number}
        return number

    def _tell(self, stage: str, step: int, models: list[nn.Module], optimizer: Any) -> None:
        """Record an update's settings, where they are others than those of the one before it."""
        if self._settings is None or self._settings[0] is not optimizer:
            by_expert = self.session.capture.coordinate_sketch
            self._settings = optimizer, OptimizerSettings(models, optimizer, by_expert)
        groups = self._settings[1].read()
        known = self._told
        number, before = (
            (known[1] + 1, known[2]) if known and known[0] == (stage, step) else (0, [])
        )
        self._told = (stage, step), number, groups
        if groups != before:
            line = {"step": step, "stage": stage, "update": number, "groups": groups}
            self._parts.line("optimizers", line)

    def _introduce(self, step: int, trainer_step: int, models: list[nn.Module]) -> None:
        """Layout and environment, at the first captured stage: by then everything is loaded."""
        if self._introduced:
            return
        self._introduced = True
        self._parts.first_step(trainer_step - step)
        described = provenance.layout(self.role, self.rank, self.world_size, self._layout)
        self._parts.once("layout", described)
        described = provenance.environment(self.session)
        described["dropout"] = dropout.probabilities(models)
        self._parts.once("environment", described)

    def _debug_file(self, stage: str, step: int, directory: Path) -> DebugFile:
        known = self._debug.get(stage)
        if known is None or known[0] != step:
            known = (step, DebugFile(directory, self.session.capture.task))
            self._debug[stage] = known
        return known[1]

    def _digest(
        self, stage: str, step: int, models: list[nn.Module], optimizer: Any = None
    ) -> dict[str, Tensor]:
        """Record the weights a stage begins with; copies of them when it will change them."""
        options = self.session.capture
        if not options.provenance:
            return {}
        # Once a stage and step (generation enters its stage once a request), and at every captured
        # step: a model that was not reloaded shows nowhere else.
        if (stage, step) not in self._described:
            self._described.add((stage, step))
            common = {"step": step, "stage": stage, "role": self.role, "rank": self.rank}
            described = weights.describe(models, options.sketch, options.coordinate_sketch)
            self._parts.lines("weights", [{**common, **record} for record in described])
            if stage in stages.TRAINING_STAGES:
                kept = buffers.describe(models, options.sketch)
                self._parts.line("buffers", {**common, "buffers": kept})
        if stage in stages.UPDATE_STAGES:
            return updates.snapshot(models, _wanted(options), options.coordinate_sketch, optimizer)
        return {}


class StageScope:
    """One entry of a stage; what the framework's hooks tell it.

    Attributes:
        captured: whether model layers are being captured.
        generated: digests of the samples an entry of the generation stage made; a record's sample
            is that of the entry its call number lies in.
        request: of an engine's entry, the request that it served (see ``frameworks/engines``).
        forward: of an engine's entry of one forward, its phase and the generated token it gives.
        calls: module calls that were captured, once the entry is over; None before.
    """

    def __init__(
        self,
        recorder: Recorder,
        stage: str,
        step: int,
        models: list[nn.Module],
        debug: DebugFile | None = None,
        optimizer: Any = None,
    ) -> None:
        self.captured = debug is not None
        self._recorder = recorder
        self._stage = stage
        self._step = step
        self._models = models
        self._debug = debug
        self._optimizer = optimizer
        #: Digests of the samples that this entry generated, in the order of their forwards.
        self.generated: list[str] = []
        self.request: str | None = None
        self.forward: tuple[str, int] | None = None
        self.calls: int | None = None
        self._micro_step = 0
        self._rows: dict[int, list[str]] = {}
        self._watch: Watch | None = None
        self._trace: Tracing | None = None
        self._updates: UpdateRecords | None = None
        if debug is not None:
            options = recorder.session.capture
            self._updates = UpdateRecords(
                debug.name, options.sketch, _wanted(options), options.coordinate_sketch
            )

    def micro_step(self, index: int) -> None:
        """A micro-batch begins (in generation: a batch of sequences, whose tokens count from 0)."""
        self._micro_step = index
        if self._trace is not None:
            self._trace.micro_step(index)
        if self._watch is not None:
            self._watch.micro_step(index)

    def tokens(self, samples: list[npt.NDArray[np.int64]] | None) -> None:
        """The tokens of each sample of the micro-batch that begins, prompt and response.

        None where they are not known; they are then read off what the model is given.
        """
        if self._watch is not None:
            self._watch.tokens(samples)

    def key_data(
        self, name: str, value: Tensor | npt.NDArray[np.generic], micro_step: int | None = None
    ) -> None:
        """Write one array of key data (see :mod:`rlprobe.capture.key_data`).

        Written when the session collects key data and this step and rank are captured, also in
        stages whose layers are not.

        Args:
            name: as users know it: ``responses``, ``old_log_probs``, …
            value: tensor (nested allowed), array, or list of rows.
            micro_step: the micro-batch; the current one when None.
        """
        options = self._recorder.session.capture
        rank = self._recorder.rank
        if not (options.key_data and options.wants_step(self._step) and options.wants_rank(rank)):
            return
        index = self._micro_step if micro_step is None else micro_step
        root = Path(self._recorder.session.dump)
        samples = self._rows.get(index, [])
        if self._trace is not None:
            self._trace.result(name, value)
        with self._unwatched():
            _, size = key_data.write(root, name, self._step, rank, index, value, samples)
        self._recorder._budget.add(size)

    def given(self, data: Mapping[str, Any]) -> None:
        """What the stage was given (tensors or lists of them, by name), for a trace's origins."""
        if self._trace is not None:
            self._trace.given(data)

    def rows(self, samples: list[str], micro_step: int) -> None:
        """The samples of a micro-batch, in its order; they name the rows of its key data."""
        self._rows[micro_step] = samples

    def loss(self, name: str, value: Any) -> None:
        """A loss or a part of it (scalar tensor or number), into debug.json."""
        if self._trace is not None:
            self._trace.result(name, value)
        if self._updates is not None:
            with self._unwatched():
                self._updates.loss(name, value)

    def gradients(self, kind: str, optimizer: Any = None) -> None:
        """Statistics of every parameter's gradient now; kind: grad, grad_reduced, grad_clipped.

        Args:
            kind: which they are.
            optimizer: Megatron's, of which the gradients are copies or shards of the model's.
        """
        if self._trace is not None and kind == "grad_reduced":
            self._trace.update(self._models)
        if self._watch is not None and kind == "grad_reduced":
            self._watch.updated()
        if self._updates is not None:
            with self._unwatched():
                self._updates.gradients(self._models, kind, optimizer)

    def settings(self, optimizer: Any) -> None:
        """What an optimizer that is about to step is told (:mod:`.optimizer_settings`)."""
        if self.captured and self._recorder.session.capture.provenance:
            with self._unwatched():
                self._recorder._tell(self._stage, self._step, self._models, optimizer)

    def gradient_norms(self, optimizer: Any) -> None:
        """Key data ``{role}_grad_norm``: see :func:`rlprobe.capture.updates.group_norms`.

        Args:
            optimizer: about to step; its steps within the stage count as micro-steps.
        """
        if self._trace is not None:
            self._trace.settings(optimizer)
        options = self._recorder.session.capture
        if options.key_data and options.wants_step(self._step):
            number = self._recorder._optimizer_step(self._stage, self._step)
            name = f"{self._recorder.role}{updates.NORMS}"
            with self._unwatched():
                self.key_data(name, updates.group_norms(optimizer, self._models), number)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """The operators' trace, where there is one, over the body."""
        if self._trace is None:
            yield
            return
        self._trace.begin(self._models)
        try:
            yield
        finally:
            self._trace.end()

    def _unwatched(self) -> contextlib.AbstractContextManager[None]:
        """Capture's own operators are no part of a trace."""
        return contextlib.nullcontext() if self._trace is None else unseen()

    def total_norm(self, norm: Any) -> None:
        """An optimizer has stepped. Key data ``{role}_total_grad_norm``: its reported norm.

        Over all ranks and before clipping; belongs to the latest :meth:`gradient_norms`.
        """
        if self._trace is not None:
            self._trace.updated()
        options = self._recorder.session.capture
        if norm is not None and options.key_data and options.wants_step(self._step):
            number = self._recorder._optimizer_steps.get((self._stage, self._step), 0)
            with self._unwatched():
                value = torch.as_tensor(float(norm), dtype=torch.float64).reshape(1)
                self.key_data(f"{self._recorder.role}_total{updates.NORMS}", value, number)

    def samples(self, digests: list[str]) -> None:
        """The samples this process works on; on every rank and stage.

        They are the mock proof, and they name the rows of key data.
        """
        options = self._recorder.session.capture
        if (options.provenance or options.key_data) and options.wants_step(self._step):
            self._recorder._parts.line(
                "samples",
                {
                    "step": self._step,
                    "stage": self._stage,
                    "rank": self._recorder.rank,
                    "samples": list(digests),
                },
            )

    def _places(self) -> list[dict[str, Any]]:
        """Where an optimizer's gradients and copies lie in their parameters."""
        return [] if self._updates is None else list(self._updates.places.values())

    def _publish(self, before: dict[str, Tensor]) -> int:
        """Write debug.json; returns how many records this entry added to it."""
        if self._updates is None or self._debug is None:
            return 0
        if before:
            self._updates.changes(self._models, before, self._optimizer)
            left = self._recorder.left
            if left is not None and not megatron_grads.is_megatron(self._optimizer):
                left(self._recorder.role, self._step, self._models)
        count = self._updates.resolve()
        self._debug.publish(self._updates.data)
        return count


def _wanted(options: CaptureOptions) -> updates.Wanted:
    """Whether the parameters of the module at a path are captured."""
    modules = set(options.modules)
    return lambda path: not modules or path in modules


__all__ = ["Recorder", "StageScope", "Tally"]
