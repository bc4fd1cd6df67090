"""The msprobe engine: every level and task of the vendor's tool, one clean session a stage entry.

Each entry of a stage is dumped aside as a session of its own (:mod:`.msprobe_debugger`) and then
added to the stage's files (:mod:`.msprobe_files`). It does change what it watches: at level L0 its
backward hooks add autograd nodes, and fp32 gradients differ in their last bits.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from rlprobe import stages
from rlprobe.capture.dumpfile import mark_partial
from rlprobe.capture.engine import StageContext, Tally
from rlprobe.capture.light.token_range import TokenRange
from rlprobe.capture.msprobe import options
from rlprobe.capture.msprobe.debugger import Debugger, configuration, debugger
from rlprobe.capture.msprobe.files import StageFiles
from rlprobe.capture.msprobe.sketches import sketched
from rlprobe.capture.names import named_modules
from rlprobe.capture.session import CaptureOptions, Session


class MsprobeEngine:
    """See :class:`rlprobe.capture.engine.Engine`.

    Args:
        session: ``settings["msprobe"]`` may hold further keys of msprobe's config.json, and
            ``settings["model_list"]`` asks for names with a chunk number even of a single model,
            as where a list was passed to msprobe.

    Raises:
        ConfigError: msprobe is not installed, lacks what the options ask for, or would refuse
            the dump path.
    """

    name = "msprobe"

    def __init__(self, session: Session) -> None:
        options.check(session.capture, session.device)
        options.check_path(Path(session.dump))
        options.check_installed()
        self._options = session.capture
        self._more: dict[str, Any] = session.settings.get("msprobe", {})
        self._as_list = bool(session.settings.get("model_list"))
        self._files: dict[str, tuple[int, StageFiles]] = {}

    def watch(self, context: StageContext, models: list[nn.Module]) -> MsprobeWatch:
        known = self._files.get(context.stage)
        if known is None or known[0] != context.step:
            known = (context.step, StageFiles(context.directory))
            self._files[context.stage] = known
        aside = context.directory.with_name(f".{context.directory.name}.msprobe")
        wanted = configuration(self._options, aside, self._more)
        made = debugger(wanted)
        return MsprobeWatch(context, known[1], models, self._options, made, self._as_list)


def renamed(models: list[nn.Module]) -> dict[str, str]:
    """Modules that msprobe calls otherwise than the light engine: its name, and ours.

    msprobe keeps wrappers in a path, the class FSDP2 makes (``FSDPLinear``), and Megatron's local
    layer numbers.
    """
    ours = {id(module): record for record, _, module in named_modules(models)}
    found: dict[str, str] = {}
    for index, model in enumerate(models):
        chunk = f"{index}." if len(models) > 1 else ""
        for path, module in model.named_modules():
            theirs = f"Module.{chunk}{path}.{type(module).__name__}"
            record = ours.get(id(module), theirs)
            if record != theirs:
                found[theirs] = record
    return found


class MsprobeWatch:
    """See :class:`rlprobe.capture.engine.Watch`."""

    def __init__(
        self,
        context: StageContext,
        files: StageFiles,
        models: list[nn.Module],
        options: CaptureOptions,
        session: Debugger,
        as_list: bool = False,
    ) -> None:
        self._context = context
        self._files = files
        self._debugger = session
        # a list's modules have the names that the vendor's own procedure gives them
        self._heads = {} if as_list else renamed(models)
        self._aside = context.directory.with_name(f".{context.directory.name}.msprobe")
        shutil.rmtree(self._aside, ignore_errors=True)
        self._open = contextlib.ExitStack()
        self._open.enter_context(sketched(options.sketch))
        try:
            session.start(self._aside, models, context.rank, options.modules, as_list)
        except BaseException:
            session.stop()
            self._open.close()
            raise
        self._tokens: TokenRange | None = None
        counted = context.stage == stages.GENERATE and not context.chosen_forwards
        if counted and options.token_range is not None:
            self._tokens = TokenRange(options.token_range, session.switch)
            handle = self._tokens.attach(models[0])
            self._open.callback(handle.remove)

    def micro_step(self, index: int) -> None:
        """msprobe counts calls itself; only generation counts tokens from here."""
        if self._tokens is not None:
            self._tokens.restart()

    def tokens(self, samples: Sequence[npt.NDArray[np.int64]] | None) -> None:
        """Which tokens a micro-batch holds; msprobe's records have no use for it."""

    def updated(self) -> None:
        """An optimizer is about to step."""

    def finish(self) -> Tally:
        try:
            self._debugger.stop()
            return self._files.add(self._aside, self._heads)
        finally:
            self._open.close()
            shutil.rmtree(self._aside, ignore_errors=True)

    def abort(self) -> None:
        try:
            self._debugger.stop()
        finally:
            self._open.close()
            shutil.rmtree(self._aside, ignore_errors=True)
            self._files.failed = True
            mark_partial(self._context.directory)
