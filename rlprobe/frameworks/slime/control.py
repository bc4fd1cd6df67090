"""What each of slime's processes knows: the session, and the number of the run's first rollout.

slime counts rollouts (``rollout_id``) from the number it resumes at; captured steps count from 0.
The rollout manager generates before anything trains, so it says what the first number is, in a
file beside the dump that every node sees; where that cannot be seen, the process's own first
number stands in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rlprobe import stages
from rlprobe.capture.files import write_json
from rlprobe.capture.session import ENV, Session
from rlprobe.frameworks import plain, switch
from rlprobe.frameworks.slime import user_config

_session: Session | None = None
_resolved = False
_first: int | None = None


def switched_on(environ: Mapping[str, str]) -> bool:
    """Whether anything is to be captured in this process."""
    path = environ.get(ENV)
    if not path:
        return False
    return switch.read(path).kind != "msprobe" or user_config.dump_on(environ)


def session() -> Session | None:
    """This run's session, or None when nothing is to be captured.

    Raises:
        ConfigError: ``RLPROBE_CONFIG`` names a file that is missing or not understood.
    """
    global _session, _resolved
    if not _resolved:
        _session, _resolved = _read(os.environ), True
    return _session


def _read(environ: Mapping[str, str]) -> Session | None:
    if not switched_on(environ):
        return None
    found = switch.read(environ[ENV])
    if found.session is not None:
        return found.session
    if found.directory is not None:
        # rollouts are slime's own debug files, which the user's script may not ask for
        return plain.session(found.directory, "slime", stages.TRAINING_STAGES, rollouts=False)
    return user_config.session(found.path)


def reset(value: Session | None = None, *, resolved: bool = False) -> None:
    """Forget what this process knows, or make ``value`` its session (tests)."""
    global _session, _resolved, _first
    _session, _resolved, _first = value, resolved, None


def announce_first(rollout_id: int) -> None:
    """The rollout manager's first rollout: the run's step 0."""
    global _first
    current = session()
    if _first is not None or current is None:
        return
    _first = rollout_id
    write_json(_first_path(current), {"first_step": rollout_id})


def first(rollout_id: int) -> int:
    """The trainer's number of step 0, as far as the process that runs ``rollout_id`` can know."""
    global _first
    current = session()
    if _first is None and current is not None:
        try:
            _first = int(json.loads(_first_path(current).read_text())["first_step"])
        except (OSError, ValueError, KeyError):
            _first = rollout_id
    return rollout_id if _first is None else _first


def step(rollout_id: int) -> int:
    """The captured step (from 0) of a rollout."""
    return rollout_id - first(rollout_id)


def _first_path(current: Session) -> Path:
    return Path(current.side) / "parts" / "first_step.json"
