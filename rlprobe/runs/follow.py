"""Tell the person who watches how far a run is: once it has started, and after every step.

A stage that takes long is told too. How much is left is what the steps so far took, each.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from rlprobe.frameworks.progress import FILE
from rlprobe.terminal import duration

_log = logging.getLogger("rlprobe")
#: A stage that takes longer is told when it is done, and not its step alone.
_LONG_S = 20.0


class Progress:
    """Follows a run's progress file and logs one line a finished step."""

    def __init__(self, role: str, side: Path, total_steps: int) -> None:
        self._role = role
        self._path = side / FILE
        self._total = total_steps
        self._position = 0
        self._last = "starting"
        self._began = time.monotonic()
        #: The step that is under way, and when it began.
        self._step: tuple[int, float] | None = None
        self._times: list[float] = []

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
        if self._step is None:
            _log.info("%s: started after %s", self._role, duration(self._since(self._began)))
        if self._step is None or self._step[0] != step:
            self._finish()
            self._step = (step, time.monotonic())
        if event["seconds"] is None:
            self._last = f"in {where}"
            _log.debug("%s: %s …", self._role, where)
            return
        self._last = f"after {where}"
        seconds = float(str(event["seconds"]))
        level = logging.INFO if seconds >= _LONG_S else logging.DEBUG
        _log.log(level, "%s: %s, %s", self._role, where, duration(seconds))

    def end(self) -> None:
        """The run has ended: the last step is told too."""
        self()
        self._finish()
        self._step = None

    def _finish(self) -> None:
        if self._step is None:
            return
        number, began = self._step
        self._times.append(self._since(began))
        left = max(0, self._total - number) * sum(self._times) / len(self._times)
        ahead = f", about {duration(left)} left" if number < self._total else ""
        took = duration(self._times[-1])
        _log.info("%s: step %d of %d in %s%s", self._role, number, self._total, took, ahead)

    @staticmethod
    def _since(moment: float) -> float:
        return time.monotonic() - moment
