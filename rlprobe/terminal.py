"""What rlprobe says, made safe to show: the one place through which all of it goes.

Names, texts and paths in messages come from dumps, rollouts and bundles that anybody may have
made. A terminal obeys escape sequences in them, half of a surrogate pair cannot be written at all,
and direction marks make a line read as something else.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

#: The name by which an OSError tells that stdout could not be written.
STDOUT = "standard output"

#: Longest line and longest message; more is cut out of the middle.
_LINE, _MESSAGE = 2_000, 20_000

_PLAIN = re.compile(r"[ -~\n\t]*")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
#: Controls, formats (direction marks), surrogates, private, unassigned; line and paragraph ends.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
#: Joiners, which scripts and emoji are written with.
_KEPT = "\n\t\u200c\u200d"


def safe(text: str) -> str:
    r"""``text`` with everything that a terminal would obey written out, as ``\x1b`` is.

    Colours are dropped: the logs of frameworks are full of them.
    """
    if _PLAIN.fullmatch(text):
        return text
    return "".join(map(_shown, _COLOUR.sub("", text)))


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _UNSAFE:
        return character
    return ascii(character)[1:-1]


def spelled(steps: Sequence[int], word: str = "step") -> str:
    """``step 3``, ``steps 0 and 2``, ``steps 0 to 19``, ``steps 0 to 2 and 5``: steps as words.

    Args:
        steps: their numbers.
        word: what they are numbers of, where these are no steps.
    """
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(step) for step in run]
    text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return f"{word} {text}" if len(steps) == 1 else f"{word}s {text}"


def short(name: str, room: int) -> str:
    r"""A name that fits ``room`` characters of one line: its beginning and its end.

    A line's end within it is written out, as ``\n``: what follows would look like a line of ours.
    """
    name = name.replace("\n", "\\n")
    if len(name) <= room:
        return name
    tail = room // 2
    return f"{name[: room - tail - 1]}…{name[-tail:]}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 record``, ``2,000 records``: a number of something, as a reader expects it."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float, *, exact: bool = True) -> str:
    """``3.1 s``, ``2 min 05 s``, ``1 h 02 min``: a time as a reader expects it.

    Args:
        seconds: it.
        exact: it was measured; an estimate has no tenths.
    """
    if seconds < (59.95 if exact else 59.5):
        return f"{seconds:.{1 if exact else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


class Paint:
    """Colours for a terminal, and none for a pipe, a file or whoever asked for none."""

    def __init__(self, stream: TextIO, *, off: bool = False) -> None:
        environment = os.environ
        asked = bool(environment.get("FORCE_COLOR"))
        plain = off or bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
        self._on = asked or (not plain and stream.isatty())

    def _wrapped(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._on else text

    def good(self, text: str) -> str:
        """What went well."""
        return self._wrapped("1;32", text)

    def bad(self, text: str) -> str:
        """What did not."""
        return self._wrapped("1;31", text)

    def warn(self, text: str) -> str:
        """What to look at."""
        return self._wrapped("1;33", text)

    def dim(self, text: str) -> str:
        """What matters less."""
        return self._wrapped("2", text)


def message(text: str) -> str:
    """A message as it is shown: safe, and no longer than somebody would read."""
    lines = [_cut(line, _LINE) for line in _cut(text, _MESSAGE).split("\n")]
    return safe("\n".join(lines))


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"


class _SafeStream:
    """A text stream that writes :func:`safe` text, in whatever encoding the stream has."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        shown = safe(text)
        encoding = self._stream.encoding or "utf-8"
        if not shown.isascii() and encoding.lower().replace("-", "") != "utf8":
            shown = shown.encode(encoding, "backslashreplace").decode(encoding)
        self.as_it_is(shown)
        return len(text)

    def as_it_is(self, text: str) -> None:
        """Write what is safe already."""
        with self._named():
            self._stream.write(text)

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # Whoever read has seen enough. What the command found, and its exit code, stay; nothing
            # that is written from here on, the interpreter's own flush either, goes anywhere.
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, STDOUT) from error

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def painted(text: str, stream: TextIO) -> None:
    """Write text in :class:`Paint`'s colours, of which all else was made :func:`safe` before."""
    if isinstance(stream, _SafeStream):
        stream.as_it_is(text)
    else:
        stream.write(text)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Whatever is printed in this block, to stdout or stderr, is made safe first."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _SafeStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
