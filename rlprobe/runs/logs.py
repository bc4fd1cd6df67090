"""A framework's output on its way to the log: frameworks print their whole configuration."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import IO

from rlprobe import redaction

_CHUNK = 1 << 16
#: A line that never ends is written in pieces of this size.
_LONGEST = 1 << 20
#: Time to write what is left once the processes are gone.
_DRAIN_S = 10.0


@contextlib.contextmanager
def written(source: IO[bytes] | None, log: IO[bytes]) -> Iterator[None]:
    """Copy ``source`` to ``log`` line by line while the block runs, without secrets.

    The processes that write to it must be gone at the end of the block. A log that cannot be
    written, on a full disk, stops nothing: the rest is read and dropped, so that nobody waits.

    Raises:
        OSError: the log could not be written; when the block is done.
    """
    if source is None:
        raise ValueError("there is no pipe to read")
    copy = _Copy(source, log, redaction.known(os.environ))
    copy.start()
    try:
        yield
    finally:
        copy.join(_DRAIN_S)
    if copy.failure is not None:
        raise copy.failure


class _Copy(threading.Thread):
    def __init__(self, source: IO[bytes], log: IO[bytes], secrets: frozenset[str]) -> None:
        super().__init__(name="log", daemon=True)
        self._source, self._log, self._secrets = source, log, secrets
        self.failure: OSError | None = None

    def run(self) -> None:
        rest = b""
        with self._source:
            while chunk := os.read(self._source.fileno(), _CHUNK):
                # progress bars end their lines with a carriage return
                lines, end = _whole(rest + chunk)
                rest = end
                self._write(lines)
        self._write(rest)

    def _write(self, data: bytes) -> None:
        if not data or self.failure is not None:
            return
        text = redaction.text(data.decode("utf-8", "surrogateescape"), self._secrets)
        try:
            self._log.write(text.encode("utf-8", "surrogateescape"))
            self._log.flush()
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, self._log.name)
        except ValueError:
            # a process that nobody knew of kept the pipe open until after the run
            self.failure = OSError(0, "was closed before all was written", self._log.name)


def _whole(data: bytes) -> tuple[bytes, bytes]:
    """Whole lines, and the beginning of the next."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    if end == 0 and len(data) >= _LONGEST:
        end = len(data)
    return data[:end], data[end:]
