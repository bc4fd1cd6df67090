"""msprobe's ``PrecisionDebugger``: one per process, and every session in it a clean one.

Traps of mindstudio-probe 26 that are handled here, each with a test that fails without:

- the debugger is a singleton whose second constructor ignores its arguments: it is made once, and
  a debugger made by somebody else is refused;
- sessions leak: records and counters go on unless the status is reset, and the step number stays;
- checksums are taken in a thread pool from live tensors, which FSDP frees and in-place operations
  change meanwhile, and the pool cannot be made on a single CPU: they are taken at once;
- with verl imported, the first and the last module are left out;
- without torch.distributed, ranks become ``proc<pid>`` directories and ``rank: [0]`` dumps
  nothing: the configuration names no rank and every start is told the rank;
- an exception in a forward leaves API hooks switched off: the next start switches them on;
- its hooks and the wrapped ``forward`` of every module stay on the model: they are taken off.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn

from rlprobe.capture.msprobe.chosen import Modules, ModuleScope
from rlprobe.capture.session import CaptureOptions
from rlprobe.errors import ConfigError, HookError


class AtOnce:
    """Stands in for a thread pool: the work is done before the tensor can change."""

    def __init__(self, max_workers: int | None = None) -> None:
        """Without threads there are none to count."""

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Do the work now; its exception is raised by ``result()``, as a pool would."""
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  whatever it is, result() raises it
            done.set_exception(error)
        return done

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is ever pending."""


class Debugger:
    """The process's debugger. Get it with :func:`debugger`."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self._made = _construct(configuration)
        self.service: Any = self._made.service
        #: By msprobe's own ``scope`` and ``list``.
        self._own_scope = self.service.data_collector.scope
        self._needs_api = configuration["level"] in ("L1", "mix")
        self._forwards: list[tuple[nn.Module, Any]] = []
        self._scope: ModuleScope | None = None
        self._restore_api()

    def start(
        self,
        directory: Path,
        models: list[nn.Module],
        rank: int,
        modules: tuple[str, ...],
        as_list: bool = False,
    ) -> None:
        """Begin a session.

        Args:
            directory: ``step0/rank{rank}`` is made below it.
            models: the model or its chunks.
            rank: of this process.
            modules: only these (Hugging Face paths) and what runs in them, all when empty.
            as_list: name a single model's modules with a chunk number too.

        Raises:
            ConfigError: none of ``modules`` is in the model.
        """
        self._reset()
        service = self.service
        service.config.dump_path = str(directory)
        self._choose(models, modules, as_list)
        if self._needs_api:
            service.api_register.register_all_api()
        self._forwards = [(m, vars(m).get("forward")) for model in models for m in model.modules()]
        with _verl_hidden():
            single = len(models) == 1 and not as_list
            self._made.start(model=models[0] if single else models, rank_id=rank)
        # Only the first start of a process takes the rank it is told.
        service.current_rank = rank

    def switch(self, on: bool) -> None:
        """Record or not, within a session (token ranges)."""
        from msprobe.core.common.runtime import Runtime

        Runtime.is_running = on
        self.service.primitive_switch = on

    def stop(self) -> None:
        """End the session: files are written, the model and torch's functions are as before."""
        try:
            self._made.stop()
        finally:
            self._unhook()
            self._restore_api()
            self._reset()

    def _reset(self) -> None:
        service = self.service
        self.switch(False)
        service.reset_status()
        service.loop = service.init_step = 0
        service.should_stop_service = False
        service.hooked_modules.clear()
        # What the pool still held belonged to a session that failed.
        service.data_collector.data_writer.stat_stack_list.clear()
        service.data_collector.data_writer.crc32_stack_list.clear()
        if self._scope is not None:
            self._scope.close()
            self._scope = None
        service.data_collector.scope = self._own_scope

    def _choose(self, models: list[nn.Module], modules: tuple[str, ...], as_list: bool) -> None:
        if not modules:
            return
        self._scope = ModuleScope(Modules(modules), models, as_list)
        if not self._scope.found:
            raise ConfigError(f"capture.modules: none of {', '.join(modules)} is in the model")
        self.service.data_collector.scope = self._scope

    def _restore_api(self) -> None:
        if self._needs_api:
            self.service.api_register.restore_all_api()

    def _unhook(self) -> None:
        from msprobe.core.dump.hook_manager import BaseHookManager

        for module, before in self._forwards:
            _unhook_module(module, before)
        self._forwards = []
        for handle in BaseHookManager.hook_handle_dict.values():
            handle.remove()
        BaseHookManager.hook_handle_dict.clear()


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
)
_MARKS = ("msprobe_hook", "msprobe_forward_hook", "msprobe_input_kwargs")


def _unhook_module(module: nn.Module, forward: Any) -> None:
    """Take msprobe's hooks, marks and wrapped ``forward`` off one module."""
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        ours = [
            key
            for key, hook in getattr(module, kind).items()
            if str(getattr(hook, "__module__", "")).startswith("msprobe.")
        ]
        for key in ours:
            for name in _HOOKS:
                if name.startswith(kind):
                    getattr(module, name).pop(key, None)
    for mark in _MARKS:
        vars(module).pop(mark, None)
    if forward is not None:
        module.forward = forward
    else:
        vars(module).pop("forward", None)


def _construct(configuration: dict[str, Any]) -> Any:
    from msprobe.core.dump.data_dump.data_processor import pytorch_processor
    from msprobe.pytorch import PrecisionDebugger

    if PrecisionDebugger._instance is not None and PrecisionDebugger._instance.initialized:
        raise HookError(
            "this process has an msprobe PrecisionDebugger that rlprobe did not make, and there "
            "can be one only; switch off what made it (verl: global_profiler.tool="
            "precision_debugger)"
        )
    pytorch_processor.ThreadPoolExecutor = AtOnce
    with tempfile.NamedTemporaryFile("w", prefix="rlprobe-", suffix=".json", dir="/tmp") as file:
        json.dump(configuration, file)
        file.flush()
        return PrecisionDebugger(config_path=file.name)


@contextlib.contextmanager
def _verl_hidden() -> Iterator[None]:
    """msprobe looks for verl among the loaded modules to leave out a model's ends."""
    from msprobe.pytorch.dump.module_dump import module_processor

    others = {name: module for name, module in sys.modules.items() if name != "verl"}
    module_processor.sys = types.SimpleNamespace(modules=others)
    try:
        yield
    finally:
        module_processor.sys = sys


_debugger: Debugger | None = None


def configuration(
    options: CaptureOptions, directory: Path, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """msprobe's config.json for the options.

    Args:
        options: the capture options.
        directory: any valid dump path.
        more: further keys of msprobe's own (``risk_level``, ``async_dump``, a task's section).
    """
    more = dict(more or {})
    task = {"scope": [], "list": [], "data_mode": ["all"], **more.pop(options.task, {})}
    task["summary_mode"] = options.summary_mode
    return {
        **more,
        "task": options.task,
        "level": options.level,
        "dump_path": str(directory),
        "rank": [],
        "step": [],
        options.task: task,
    }


def debugger(wanted: dict[str, Any]) -> Debugger:
    """The process's debugger, made at the first call.

    Raises:
        ConfigError: an earlier call in this process wanted other options.
        HookError: somebody else made a debugger.
    """
    global _debugger
    if _debugger is None:
        _debugger = Debugger(wanted)
        return _debugger
    held = _debugger.configuration
    other = sorted(
        key for key in {*wanted, *held} if key != "dump_path" and wanted.get(key) != held.get(key)
    )
    if other:
        changes = ", ".join(f"{key}: {held.get(key)!r} -> {wanted.get(key)!r}" for key in other)
        raise ConfigError(f"msprobe takes its options once a process and cannot change {changes}")
    return _debugger
