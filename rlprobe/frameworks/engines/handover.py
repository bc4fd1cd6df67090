"""The session that an engine's processes read: a file, because they are no processes of Ray's.

The process that starts the engine writes the session and points ``RLPROBE_CONFIG`` at it; engines
spawn their workers from there, and the ``.pth`` file registers the hooks in each.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from rlprobe import stages
from rlprobe.capture.files import append_line
from rlprobe.capture.session import ENV, Session
from rlprobe.errors import HookError
from rlprobe.frameworks import switch

_KEY = "engine"


@dataclass(frozen=True)
class Replica:
    """One copy of an engine, of ``tp * pp`` processes."""

    #: Its number among the copies.
    number: int
    tp: int
    pp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.pp


def give(session: Session, replica: Replica) -> Path:
    """Let the engine that this process is about to start know the session; where it is written."""
    settings = {**session.settings, _KEY: dataclasses.asdict(replica)}
    path = Path(session.side) / "engines" / f"replica{replica.number}-{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    handed = dataclasses.replace(session, settings=settings)
    path.write_text(handed.to_json(), encoding="utf-8")
    os.environ[ENV] = str(path)
    return path


@functools.cache
def taken() -> tuple[Session, Replica] | None:
    """The session and replica of this process; None where no engine was started with one.

    Raises:
        ConfigError: ``RLPROBE_CONFIG`` names no configuration.
        HookError: the session's entry about the replica is damaged.
    """
    path = os.environ.get(ENV)
    session = switch.read(path).session if path else None
    found = None if session is None else session.settings.get(_KEY)
    if session is None or found is None:
        return None
    try:
        return session, Replica(**found)
    except TypeError as error:
        raise HookError(
            f"{path} does not say which replica of an engine this is: {error}"
        ) from error


def dumps() -> bool:
    """Whether this process is to dump layers; without, weights are digested at the most."""
    given = taken()
    if given is None:
        return False
    capture = given[0].capture
    generated = stages.GENERATE in capture.stages and capture.token_range is not None
    return generated or stages.FORCED in capture.stages


def joined(session: Session, replica: int, request: str, sample: str) -> None:
    """Leave which sample a marked request became; a run's manifest joins the two."""
    path = Path(session.side) / "parts" / "requests" / f"rollout-rank{replica}.jsonl"
    append_line(path, {"request": request, "sample": sample})
