"""What the driver tells the workers: the session and the step, through Ray's key-value store.

The session comes from ``RLPROBE_CONFIG`` where an alignment set it; on a plain verl command line
the driver turns ``ascend_precision_collector`` into a session and publishes its text. The step is
not in the batches that reach verl's workers, so the driver publishes it as well. One read costs
about 0.2 ms and happens once a stage.
"""

from __future__ import annotations

import json
import os
from typing import Any

from rlprobe.capture.session import ENV, Session
from rlprobe.frameworks import switch

#: The directory the training command was started in; relative paths of the collector's YAML mean
#: this one, in whichever process they are read. Workers inherit it with the environment.
DRIVER_DIRECTORY = "RLPROBE_DRIVER_DIRECTORY"

_NAMESPACE = b"rlprobe"
_session: Session | None = None
_resolved = False
#: Stands in for Ray's store where training runs without Ray (see ``inprocess.py``).
_local: dict[str, Any] | None = None


def use_local(values: dict[str, Any]) -> None:
    """Publish to and read from ``values`` instead of Ray's key-value store."""
    global _local
    _local = values


def publish(key: str, value: Any) -> None:
    """Store a JSON value under ``key`` for every process of this Ray cluster."""
    if _local is not None:
        _local[key] = value
        return
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key.encode(), json.dumps(value).encode(), overwrite=True, namespace=_NAMESPACE)


def read(key: str) -> Any:
    """The value published under ``key``, or None (also where Ray is not running)."""
    if _local is not None:
        return _local.get(key)
    import ray
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_initialized

    if not ray.is_initialized() and not _internal_kv_initialized():
        return None
    raw = _internal_kv_get(key.encode(), namespace=_NAMESPACE)
    return None if raw is None else json.loads(raw)


def session() -> Session | None:
    """This run's session, or None when nothing is to be captured.

    Raises:
        ConfigError: ``RLPROBE_CONFIG`` names a file that cannot be read as a configuration.
    """
    global _session, _resolved
    if _resolved:
        return _session
    path = os.environ.get(ENV)
    if path:
        found = switch.read(path)
        if found.session is not None:
            _session, _resolved = found.session, True
            return _session
    published = read("session")
    if published is not None:
        text = published["text"]
        _session, _resolved = (Session.from_json(text) if text else None), True
    return _session


def set_session(value: Session | None) -> None:
    """Make ``value`` the session of this process and publish it (driver only)."""
    global _session, _resolved
    _session, _resolved = value, True
    publish("session", {"text": value.to_json() if value else None})


def publish_step(trainer_step: int) -> None:
    """Publish the trainer's step number; the first one published is the run's first step."""
    if read("first_step") is None:
        publish("first_step", trainer_step)
    publish("step", trainer_step)


def step() -> tuple[int, int]:
    """``(step counted from 0, the trainer's own number)`` of the step now running."""
    trainer_step = read("step")
    first = read("first_step")
    if trainer_step is None or first is None:
        return 0, 1
    return int(trainer_step) - int(first), int(trainer_step)


def first_step() -> int:
    """The trainer's number of this run's first step (1 unless resumed)."""
    first = read("first_step")
    return 1 if first is None else int(first)
