"""The numbers slime logs, by step: ``side/metrics.jsonl``.

slime logs from several processes and, where a rollout is split into several train steps, several
times under one name; the later ones get the train step's place behind the name (``train/loss@1``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlprobe.capture.files import append_line
from rlprobe.frameworks.slime import control

FILE = "metrics.jsonl"

#: The rollout this process works on.
_rollout_id: int | None = None
_seen: Counter[str] = Counter()


def enter(rollout_id: int) -> None:
    """A rollout begins in this process."""
    global _rollout_id
    if _rollout_id != rollout_id:
        _rollout_id = rollout_id
        _seen.clear()


def log(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """slime's ``logging_utils.log(args, metrics, step_key)``."""
    values = kwargs.get("metrics", args[1] if len(args) > 1 else None)
    session = control.session()
    if session is not None and _rollout_id is not None and isinstance(values, dict):
        found = _numbers(values)
        if found:
            line = {
                "step": control.step(_rollout_id),
                "trainer_step": _rollout_id,
                "metrics": found,
            }
            append_line(Path(session.side) / FILE, line)
    return original(*args, **kwargs)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if name.endswith("/step"):
            continue  # a counter that trackers plot against
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue  # trackers also take tables and text; a metric is a number
        nth = _seen[name]
        _seen[name] += 1
        found[f"{name}@{nth}" if nth else str(name)] = number
    return found
