"""Tell the person who watches which step and stage a run is in."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rlprobe.frameworks.progress import FILE

_log = logging.getLogger("rlprobe")


class Progress:
    """Follows a run's progress file and logs one line per finished stage."""

    def __init__(self, role: str, side: Path, total_steps: int) -> None:
        self._role = role
        self._path = side / FILE
        self._total = total_steps
        self._position = 0
        self._last = "starting"

    def __call__(self) -> None:
        """Log what happened since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            chunk = file.read()
        # a line still being written is left for the next call
        complete, _, _ = chunk.rpartition(b"\n")
        self._position += len(complete) + 1 if complete else 0
        for line in complete.splitlines():
            self._tell(json.loads(line))

    @property
    def last(self) -> str:
        """Where the run was last seen, for an error message."""
        return self._last

    def _tell(self, event: dict[str, object]) -> None:
        step = int(str(event["step"])) + 1
        where = f"step {step}/{self._total}: {event['stage']}"
        if event["seconds"] is None:
            self._last = f"in {where}"
            _log.debug("%s: %s …", self._role, where)
            return
        self._last = f"after {where}"
        _log.info("%s: %s, %.1f s", self._role, where, event["seconds"])
