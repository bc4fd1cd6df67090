"""The light engine: L0 statistics without any effect on the run.

Names, schema and numbers are msprobe's at level L0 with task ``statistics``; besides, it has the
first and the last module (msprobe leaves them out once verl is imported), the gradients of
keyword inputs, and sketches.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn

from rlprobe import stages
from rlprobe.capture import fsdp1, megatron_dispatch
from rlprobe.capture.dumpfile import DumpFiles, mark_partial
from rlprobe.capture.engine import StageContext, Tally
from rlprobe.capture.light.choices import Routing
from rlprobe.capture.light.coordinates import Samples, Tokens
from rlprobe.capture.light.hooks import Tape, attach, attach_root
from rlprobe.capture.light.logical import Logical
from rlprobe.capture.light.pieces import Places, Undivided
from rlprobe.capture.light.routers import may_route
from rlprobe.capture.light.routing import ChosenExperts
from rlprobe.capture.light.statistics import Statistics
from rlprobe.capture.light.tensors import Tensors
from rlprobe.capture.light.token_range import TokenRange
from rlprobe.capture.light.token_sketches import TokenSketches
from rlprobe.capture.megatron_dispatch import DispatchWatch
from rlprobe.capture.megatron_places import MegatronPlaces
from rlprobe.capture.names import named_modules, unwrap
from rlprobe.capture.replayed_routing import RecordedRouting, ReplayedRouting
from rlprobe.capture.session import CaptureOptions, Session
from rlprobe.errors import ConfigError

_log = logging.getLogger("rlprobe")


def check(options: CaptureOptions) -> None:
    """Refuse what only the msprobe engine can do.

    Raises:
        ConfigError: level, task or summary_mode is not L0 statistics.
    """
    wanted = {"level": "L0", "task": "statistics", "summary_mode": "statistics"}
    for key, only in wanted.items():
        found = getattr(options, key)
        if found != only:
            raise ConfigError(
                f"capture.{key}: the light engine has {only!r} only, found {found!r}; "
                "set capture.engine to 'msprobe' for it"
            )


class _StageState:
    """What a stage keeps between two entries of one step."""

    def __init__(self, context: StageContext, session: Session) -> None:
        options = session.capture
        self.files = DumpFiles(
            context.directory, "tensor" if options.tensors else "statistics", "L0"
        )
        self.tokens: TokenSketches | None = None
        if options.token_sketch:
            budget = options.token_sketch_mib << 20
            self.tokens = TokenSketches(Path(session.side), context, budget)
        self.counts: dict[str, int] = {}
        self.failed = False
        self.micro_step = 0
        self.numbers = Statistics(options.sketch)
        if options.tensors:
            self.numbers = Tensors(
                options.sketch,
                context.directory,
                lambda: not options.micro_steps or self.micro_step in options.micro_steps,
                options.tensor_budget,
            )
        #: Which tokens the model works on; None where nothing needs to know.
        self.model_tokens: Tokens | None = None
        self.logical: Logical | None = None
        # an engine's forwards are told apart by request and token, not by sample
        self.chosen_experts: ChosenExperts | None = None
        self.replayed: ReplayedRouting | None = None
        training = context.stage in stages.TRAINING_STAGES
        # an engine that is led through a response is given it whole
        routed = options.routing and (training or context.stage == stages.FORCED)
        if routed or (training and options.coordinate_sketch):
            self.model_tokens = Tokens()
            if routed:
                self.replayed = _replayed(session, context, self.model_tokens)
                budget = options.token_sketch_mib << 20
                self.chosen_experts = ChosenExperts(
                    Path(session.side), context, budget, self.model_tokens
                )
                self.chosen_experts.replayed = self.replayed
            if training and options.coordinate_sketch:
                self.logical = Logical(Path(session.side), context, self.numbers, self.model_tokens)


def _replayed(session: Session, context: StageContext, tokens: Tokens) -> ReplayedRouting | None:
    """What replays another run's choices of experts in a stage; None where nothing is to."""
    if session.routing is None:
        return None
    path = Path(session.routing) / f"{context.stage}-step{context.step}.npz"
    # a stage of which the other run has no choices has no routers
    return ReplayedRouting(RecordedRouting(path), tokens) if path.is_file() else None


class LightEngine:
    """See :class:`rlprobe.capture.engine.Engine`.

    Raises:
        ConfigError: the options ask for more than L0 statistics.
    """

    name = "light"

    def __init__(self, session: Session) -> None:
        check(session.capture)
        self._session = session
        self._states: dict[str, tuple[int, _StageState]] = {}

    def watch(self, context: StageContext, models: list[nn.Module]) -> LightWatch:
        known = self._states.get(context.stage)
        if known is None or known[0] != context.step:
            known = (context.step, _StageState(context, self._session))
            self._states[context.stage] = known
        return LightWatch(context, known[1], models, self._session.capture)


class LightWatch:
    """See :class:`rlprobe.capture.engine.Watch`."""

    def __init__(
        self,
        context: StageContext,
        state: _StageState,
        models: list[nn.Module],
        options: CaptureOptions,
    ) -> None:
        self._context = context
        self._state = state
        files = state.files
        numbers = state.numbers
        trains = context.stage in stages.UPDATE_STAGES
        self._tape = Tape(
            state.counts,
            files.construct,
            files.stacks,
            numbers,
            state.tokens,
            trains,
            state.logical,
            Routing.of(models) if state.tokens is not None else None,
            state.chosen_experts,
            state.model_tokens,
        )
        wanted = set(options.modules)
        places: Places = Undivided()
        routers = state.chosen_experts is not None and any(
            may_route(path) for _, path, _ in named_modules(models)
        )
        if state.model_tokens is not None and (state.logical is not None or routers):
            roots = [unwrap(model)[1] for model in models]
            for root in roots:
                attach_root(self._tape, root)
            places = MegatronPlaces.of(roots) or places
            state.model_tokens.shards = places.shards
            for _, path, module in named_modules(models):
                if state.replayed is not None and may_route(path):
                    state.replayed.attach(path, module, self._tape.handles.append)
                if state.logical is not None and megatron_dispatch.is_layer(module):
                    DispatchWatch(self._tape, path, module, every_rank=not options.ranks)
        attach(
            self._tape,
            named_modules(models),
            lambda path: not wanted or path in wanted,
            places,
            fsdp1.gathered(models),
        )
        self._tokens = None
        counted = context.stage == stages.GENERATE and not context.chosen_forwards
        if counted and options.token_range is not None:
            self._tokens = TokenRange(options.token_range, self._switch)
            self._tape.handles.append(self._tokens.attach(models[0]))

    def _switch(self, on: bool) -> None:
        self._tape.active = on

    def micro_step(self, index: int) -> None:
        """Module calls are counted by the hooks; tokens are counted from here."""
        self._tape.micro_step = self._state.micro_step = index
        if self._tokens is not None:
            self._tokens.restart()

    def tokens(self, samples: Samples | None) -> None:
        """The tokens of each sample of the micro-batch that begins; None: read off the model."""
        if self._state.model_tokens is not None:
            self._state.model_tokens.told(samples)

    def updated(self) -> None:
        """Records of the whole stage are of what ran before weights first changed."""
        if self._state.model_tokens is not None:
            self._state.model_tokens.close()

    def finish(self) -> Tally:
        tape = self._tape
        tape.close()
        records = tape.statistics.resolve()
        if isinstance(tape.statistics, Tensors):
            tape.statistics.name(tape.data)
            if tape.statistics.left_out:
                _log.warning(
                    "%s: the budget of %s bytes is spent: %d tensors kept, %d left out",
                    self._context.stage, tape.statistics.budget, tape.statistics.kept,
                    tape.statistics.left_out,
                )  # fmt: skip
        if not self._state.failed:
            self._state.files.publish(tape.data)
            if self._state.tokens is not None:
                self._state.tokens.publish()
            if self._state.logical is not None:
                self._state.logical.publish()
            if self._state.chosen_experts is not None:
                self._state.chosen_experts.publish()
        return Tally(records, len(tape.data))

    def abort(self) -> None:
        self._tape.close()
        self._state.failed = True
        mark_partial(self._context.directory)
