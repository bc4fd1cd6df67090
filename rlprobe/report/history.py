"""Pages of earlier runs: kept beside the new one, and what each says of itself.

A page carries the digest of its own text, in which the digest itself is written as zeros.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from markupsafe import Markup

#: Beside ``report.html``.
DIRECTORY = "history"
#: A page's head, with everything that it says of itself, is within this many characters.
_HEAD = 1 << 16
_PREFIX = "rlprobe-"
_DIGEST = '<meta name="rlprobe-digest" content="sha256:{}">'
_ZEROS = "0" * 64


@dataclass(frozen=True)
class Page:
    """What a page says of itself."""

    path: Path
    name: str
    verdict: str
    sentence: str
    runs: str
    #: sha256 of the diagnosis that it shows; empty where it does not say.
    diagnosis: str
    #: When the page was written.
    written: datetime.datetime


class _Head(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name") or ""
        if tag == "meta" and name.startswith(_PREFIX):
            self.found[name.removeprefix(_PREFIX)] = given.get("content") or ""


def read_page(path: Path) -> Page | None:
    """What a page says of itself; None where it is no page of this or a later version."""
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            text = stream.read(_HEAD)
        written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    except OSError:
        return None
    head = _Head()
    head.feed(text)
    known = head.found
    if "runs" not in known:
        return None
    return Page(
        path,
        known.get("name", ""),
        known.get("verdict", ""),
        known.get("sentence", ""),
        known["runs"],
        known.get("diagnosis", ""),
        written,
    )


def unsealed() -> Markup:
    """What stands in a page's head before its digest is known."""
    return Markup(_DIGEST.format(_ZEROS))


def sealed(text: str) -> str:
    """A page with its digest."""
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
    return text.replace(_DIGEST.format(_ZEROS), _DIGEST.format(digest), 1)


def is_whole(path: Path) -> bool:
    """Whether a page is what was written; also one of an earlier version, which does not say.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    before, mark, after = data.partition(_DIGEST.partition("{}")[0].encode())
    if not mark:
        return b'name="rlprobe-diagnosis"' not in before[:_HEAD]
    zeros = before + mark + _ZEROS.encode() + after[64:]
    return after[:64] == hashlib.sha256(zeros).hexdigest().encode()


def keep(path: Path, runs: str) -> None:
    """Move a page of other runs aside, so that a new one does not silently replace it.

    Args:
        path: ``report.html``, which may not be there.
        runs: keys of the runs of the page to come.
    """
    old = read_page(path)
    if old is None or old.runs == runs:
        return
    target = re.sub(r"[^0-9a-f]", "", old.runs.rpartition("-")[2])[:12]
    aside = path.parent / DIRECTORY / f"{old.written:%Y%m%dT%H%M%SZ}-{target or 'unknown'}.html"
    aside.parent.mkdir(exist_ok=True)
    path.replace(aside)


def pages(directory: Path) -> list[Page]:
    """A results directory's page and those before it, newest first."""
    files = [directory / "report.html", *sorted((directory / DIRECTORY).glob("*.html"))]
    found = [page for file in files if (page := read_page(file)) is not None]
    return sorted(found, key=lambda page: page.written, reverse=True)
