"""The inference side: what SGLang's forwards are dumped, and which are left out.

From 0.5.11 SGLang dumps by itself (``--msprobe-dump-config``, through slime
``--sglang-msprobe-dump-config``). Below, the same is done here around ``ModelRunner``, with the
configuration that ``RLPROBE_INFERENCE_CONFIG`` names. Either way one forward is one msprobe step,
so the forwards that no rollout asked for must not count: slime polls ``/health_generate``, which
generates a token from one made-up token, and idle ranks run empty batches.

Written against SGLang 0.5.10 and 0.5.11; contract-tested, not run here.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlprobe.errors import HookError
from rlprobe.frameworks.engines.eager import without_dynamo
from rlprobe.frameworks.engines.sglang import is_probe, runner_class

#: msprobe's config.json for the engine, below SGLang 0.5.11.
CONFIG = "RLPROBE_INFERENCE_CONFIG"


def patch(module: ModuleType) -> None:
    """Wrap ``ModelRunner``: keep probes out, and dump where SGLang cannot by itself.

    Raises:
        HookError: ``ModelRunner`` has no ``__init__`` or ``forward``, or a dump is asked for twice.
    """
    runner = runner_class(module)
    runner.__init__ = _building(runner.__init__)
    runner.forward = _filtering(runner.forward)


def _building(build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        config = os.environ.get(CONFIG)
        given = kwargs.get("server_args") or _server_args(args, required=bool(config))
        if config:
            _prepare(given)
        if config or getattr(given, "msprobe_dump_config", None):
            without_dynamo()
        build(self, *args, **kwargs)
        if config and not getattr(self, "is_draft_worker", False):
            self._rlprobe_debugger = _debugger(config)

    return wrapper


def _server_args(args: tuple[Any, ...], required: bool) -> Any:
    found = [value for value in args if hasattr(value, "disable_cuda_graph")]
    if not found and required:
        raise HookError("ModelRunner was built without server_args; SGLang cannot be dumped")
    return found[0] if found else None


def _prepare(server_args: Any) -> None:
    """What a dump needs of the server."""
    if getattr(server_args, "msprobe_dump_config", None):
        raise HookError(
            f"this SGLang dumps by itself (--sglang-msprobe-dump-config); unset {CONFIG}, or every "
            "forward is dumped twice"
        )
    if not server_args.disable_cuda_graph:
        sys.stderr.write("rlprobe: CUDA graph is off in this server: a graph runs no hooks\n")
        server_args.disable_cuda_graph = True
    if not getattr(server_args, "skip_server_warmup", True):
        raise HookError("the server warms up, which would be dumped; pass --skip-server-warmup")


def _debugger(config: str) -> Any:
    from msprobe.pytorch import PrecisionDebugger, seed_all

    seed_all(mode=True)
    return PrecisionDebugger(config_path=config)


def _filtering(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if is_probe(forward_batch):
            return _without_own_dump(self, forward, forward_batch, args, kwargs)
        debugger = getattr(self, "_rlprobe_debugger", None)
        if debugger is None:
            return forward(self, forward_batch, *args, **kwargs)
        debugger.start(model=self.model)
        try:
            return forward(self, forward_batch, *args, **kwargs)
        finally:
            debugger.stop()
            debugger.step()

    return wrapper


def _without_own_dump(
    runner: Any, forward: Callable[..., Any], batch: Any, args: Any, kwargs: Any
) -> Any:
    """Run a forward that SGLang's own dump (0.5.11 on) must not count."""
    own = getattr(runner, "msprobe_debugger", None)
    if own is None:
        return forward(runner, batch, *args, **kwargs)
    runner.msprobe_debugger = None
    try:
        return forward(runner, batch, *args, **kwargs)
    finally:
        runner.msprobe_debugger = own
