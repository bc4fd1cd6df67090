"""Pages of earlier runs: kept beside the new one, and what each says of itself."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

#: Beside ``report.html``.
DIRECTORY = "history"
#: A page's head, with everything that it says of itself, is within this many characters.
_HEAD = 1 << 16
_PREFIX = "rlprobe-"


@dataclass(frozen=True)
class Page:
    """What a page says of itself."""

    path: Path
    name: str
    verdict: str
    sentence: str
    runs: str
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
        written,
    )


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
