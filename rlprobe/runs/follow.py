"""Tell the person who watches how far a run is: once it has started, and after every step.

A stage that takes long is told too. How much is left is what the steps so far took, each. After a
silent minute there is a line, whatever the run is at.
"""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path

from rlprobe.frameworks.progress import FILE
from rlprobe.terminal import duration

_log = logging.getLogger("rlprobe")
#: A stage that takes longer is told when it is done, and not its step alone.
_LONG_S = 20.0
#: Seconds after which silence is broken.
SILENCE_S = 60.0
#: What a framework's own log says of a run that has not reached its first stage, the latest last.
_PHASES = (
    (re.compile(r"ray init kwargs|Using address local|Connecting to existing Ray"), "starting Ray"),
    (
        re.compile(r"Started a local Ray instance|Connected to Ray cluster|\(\w+ pid=\d+"),
        "starting the workers",
    ),
    (
        re.compile(
            r"Loading weights|Loading checkpoint shards|loading checkpoint|Loading safetensors"
            r"|Total steps:"
        ),
        "loading the model",
    ),
    (
        re.compile(
            r"Capturing CUDA graph|torch\.compile takes|Compiling|compile_cache|AutoTune|ATC run"
            r"|Compile op|jit_compile"
        ),
        "compiling kernels",
    ),
    (re.compile(r"Training Progress:\s+0%"), "generating"),
)
#: The end of a log that tells where a run is.
_TAIL_BYTES = 64 << 10


class Progress:
    """Follows a run's progress file and logs one line a finished step.

    Args:
        role: the run's, for the lines.
        side: where the framework's processes leave their progress.
        total_steps: of the run.
        log: the framework's own, which tells where a silent run is; None where there is none.
        silence_s: after so long without a line there is one.
    """

    def __init__(
        self,
        role: str,
        side: Path,
        total_steps: int,
        log: Path | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._role = role
        self._path = side / FILE
        self._total = total_steps
        self._framework_log = log
        self._silence_s = silence_s
        #: When something was last said, and when the run last got somewhere.
        self._said = self._moved = time.monotonic()
        self._size = 0
        self._position = 0
        self._last = "starting"
        self._began = time.monotonic()
        #: The step that is under way, and when it began.
        self._step: tuple[int, float] | None = None
        self._times: list[float] = []
        #: Seconds until the first stage began; None before.
        self.started_after: float | None = None

    def __call__(self) -> None:
        """Log what happened since the last call, or that nothing did for long."""
        for line in self._news():
            self._tell(json.loads(line))
        if self._since(self._said) >= self._silence_s:
            self._say_where()

    def _news(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            chunk = file.read()
        # a line still being written is left for the next call
        complete, _, _ = chunk.rpartition(b"\n")
        self._position += len(complete) + 1 if complete else 0
        return complete.splitlines()

    @property
    def began(self) -> bool:
        """Whether a stage has begun."""
        return self._last != "starting"

    @property
    def last(self) -> str:
        """Where the run was last seen, for an error message."""
        return self._last

    def _tell(self, event: dict[str, object]) -> None:
        step = int(str(event["step"])) + 1
        where = f"step {step}/{self._total}: {event['stage']}"
        self._moved = time.monotonic()
        if self._step is None:
            self._said = self._moved
            self.started_after = self._since(self._began)
            _log.info("%s: started after %s", self._role, duration(self.started_after))
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
        if level == logging.INFO:
            self._said = self._moved
        _log.log(level, "%s: %s, %s", self._role, where, duration(seconds))

    def end(self) -> None:
        """The run has ended: the last step is told too."""
        self()
        self._finish()
        self._step = None

    def _say_where(self) -> None:
        self._said = time.monotonic()
        where = self._last if self.began else self._phase()
        log = self._framework_log
        size = log.stat().st_size if log is not None and log.exists() else 0
        grew = "its log grows" if size > self._size else "nothing new in its log"
        self._size = size
        _log.info("%s: %s, for %s; %s", self._role, where, duration(self._since(self._moved)), grew)

    def _phase(self) -> str:
        """What a run that has reached no stage is at, by what its framework wrote last."""
        log = self._framework_log
        if log is None or not log.exists():
            return "starting the framework"
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
        found = [phase for pattern, phase in _PHASES if pattern.search(text)]
        return found[-1] if found else "starting the framework"

    def _finish(self) -> None:
        if self._step is None:
            return
        self._said = time.monotonic()
        number, began = self._step
        self._times.append(self._since(began))
        left = max(0, self._total - number) * sum(self._times) / len(self._times)
        ahead = f", about {duration(left, exact=False)} left" if number < self._total else ""
        took = duration(self._times[-1])
        _log.info("%s: step %d of %d in %s%s", self._role, number, self._total, took, ahead)

    @staticmethod
    def _since(moment: float) -> float:
        return time.monotonic() - moment
