"""fp32 training: slime itself knows bf16 and fp16 only.

slime sets ``bf16`` wherever ``fp16`` is not asked for. A run in full precision, such as the
high-precision control, takes that back before the arguments are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rlprobe.errors import HookError

#: Set by the launch of a run in full precision.
ENV = "RLPROBE_SLIME_PRECISION"


def set_defaults(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """slime's ``set_default_megatron_args``, then full precision where the run asks for it."""
    configured = original(*args, **kwargs)
    if os.environ.get(ENV) == "fp32":
        configured.bf16 = configured.fp16 = False
    return configured


def require(configured: Any) -> None:
    """Refuse a run in full precision in which slime has set another.

    Raises:
        HookError: the arguments that an actor is built with ask for half precision.
    """
    halves = [name for name in ("bf16", "fp16") if getattr(configured, name, False)]
    if os.environ.get(ENV) == "fp32" and halves:
        raise HookError(
            f"precision: fp32 is wanted, but slime set {halves[0]}; it sets precision in another "
            "way than rlprobe knows"
        )
