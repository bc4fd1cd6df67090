"""fp32 training: slime itself knows bf16 and fp16 only.

slime sets ``bf16`` wherever ``fp16`` is not asked for. A run in full precision, such as the
high-precision control, takes that back before the arguments are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

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
