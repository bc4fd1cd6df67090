"""``PROMPTS_ONLY=1``: engine and trainer over the same tokens, in one forward each.

Training against inference is comparable only where both run the same forward. In this mode a sample
is its prompt alone, every token but the first being its response, and the engine's log-probs are
those of the prompt's prefill. What it asks of a framework is in the framework's own module.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlprobe.errors import ConfigError

ENV = "PROMPTS_ONLY"


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the mode is on.

    Raises:
        ConfigError: the variable is set to something else than 0 or 1.
    """
    value = environ.get(ENV, "").strip() or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{ENV}: found {value!r}; accepted: 1, or 0 (the same as unset)")
    return value == "1"
