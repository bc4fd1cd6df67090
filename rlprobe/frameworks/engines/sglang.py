"""SGLang: ``ModelRunner.forward``.

The model is looked up at every forward and hooks live for one forward, so that weight updates need
no care. Draft models of speculative decoding are left alone.

Written against SGLang 0.5.10, 0.5.12 and 0.5.23; contract-tested, not run here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlprobe.errors import HookError
from rlprobe.frameworks.engines import handover
from rlprobe.frameworks.engines.eager import without_dynamo
from rlprobe.frameworks.engines.forwards import Forwards, Request
from rlprobe.frameworks.wrap import wrap_family

CLASS = "ModelRunner"
#: SGLang's prefix of the request ids of health checks (``sglang.srt.constants``).
_HEALTH = "HEALTH_CHECK"

_forwards = Forwards("sglang")


def patch(module: ModuleType) -> None:
    """Wrap ``ModelRunner``.

    Raises:
        HookError: there is none, or not with the methods that are wrapped.
    """
    wrap_family(
        runner_class(module),
        {"load_model": around_load_model, "forward": around_forward},
        framework="sglang",
    )


def runner_class(module: ModuleType) -> Any:
    """SGLang's runner.

    Raises:
        HookError: the module has none that runs forwards.
    """
    runner = getattr(module, CLASS, None)
    if runner is None or not callable(getattr(runner, "forward", None)):
        raise HookError(f"{module.__name__} has no ModelRunner.forward; SGLang cannot be dumped")
    return runner


def around_load_model(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Nothing that the engine would compile runs hooks."""
    if handover.dumps():
        without_dynamo()
    return original(self, *args, **kwargs)


def around_forward(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dump a forward that a marked request asks for."""
    if getattr(self, "is_draft_worker", False):
        return original(self, *args, **kwargs)
    batch = kwargs.get("forward_batch", args[0] if args else None)
    return _forwards.run(
        getattr(self, "model", None),
        lambda: _requests(self, batch),
        lambda: original(self, *args, **kwargs),
    )


def _requests(runner: Any, batch: Any) -> list[Request]:
    """The requests of a forward; SGLang tells prompts from decoding, which gives a token each."""
    tokens: dict[str, int] = runner.__dict__.setdefault("_rlprobe_tokens", {})
    ids = [str(rid) for rid in batch.rids or ()]
    prompt = not batch.forward_mode.is_decode()
    now = {rid: 0 if prompt else tokens.get(rid, 0) + 1 for rid in ids}
    # those of other requests are not needed any more: a captured step has one at a time
    runner._rlprobe_tokens = now
    return [Request(rid, token) for rid, token in now.items()]


def is_probe(batch: Any) -> bool:
    """Whether no rollout asked for a forward: an idle batch, or a health check.

    A health check is told by its request id where the batch carries it, else by what it is: one
    request whose whole sequence is one token.
    """
    mode = getattr(batch, "forward_mode", None)
    if mode is not None and mode.is_idle():
        return True
    ids = getattr(batch, "rids", None)
    if ids:
        return all(str(rid).startswith(_HEALTH) for rid in ids)
    tokens = getattr(batch, "input_ids", None)
    total = getattr(batch, "seq_lens_sum", None)
    return tokens is not None and tokens.numel() == 1 and total == 1
