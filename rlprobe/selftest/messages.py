"""What is told while a self-test runs: a line per case. The rest is in a log of each trial.

A trial is a whole alignment, and its pipeline says forty things. Of dozens of trials, two at a
time, they are of no use on the screen, and drown what is: which case is done, what failed, and
that a new alignment is collected first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

_ALL = logging.getLogger("rlprobe")
#: Loggers below this one speak to whoever watches.
_OWN = "rlprobe.selftest"


def briefly() -> None:
    """Let the handlers that are there tell warnings and the self-test's own messages only."""
    for handler in _ALL.handlers:
        # The level asked for was the logger's; logs of trials have the progress also with -q.
        handler.setLevel(_ALL.level)
        handler.addFilter(_is_for_the_screen)
    _ALL.setLevel(min(_ALL.level, logging.INFO))


def _is_for_the_screen(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.startswith(_OWN)


@contextlib.contextmanager
def kept(log: Path) -> Iterator[None]:
    """Append what this thread's part of the package says to ``log``."""
    thread = threading.get_ident()
    log.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(lambda record: record.thread == thread)
    _ALL.addHandler(handler)
    try:
        yield
    finally:
        _ALL.removeHandler(handler)
        handler.close()
