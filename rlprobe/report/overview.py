"""Many alignments on one page: the newest verdict of each, and those before it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from rlprobe.errors import UsageError
from rlprobe.files import replace_text
from rlprobe.report import history, words
from rlprobe.report.page import asset
from rlprobe.report.printable import printable

NAME = "overview.html"


@dataclass(frozen=True)
class Line:
    """One page of an alignment."""

    verdict: str
    sentence: str
    written: str
    link: str


@dataclass(frozen=True)
class Entry:
    """One alignment: its pages, newest first."""

    name: str
    lines: list[Line]


def write(directories: Sequence[Path], out: Path) -> Path:
    """Write a page about several results directories.

    Args:
        directories: RESULTS_DIRs with ``report.html``, or directories of such.
        out: the file to write; links are relative to it.

    Raises:
        UsageError: there is no page in any of them.
    """
    found: dict[str, list[history.Page]] = {}
    for directory in directories:
        places = [directory, *sorted(p.parent for p in directory.glob("*/report.html"))]
        for place in places:
            for page in history.pages(place):
                found.setdefault(page.name, []).append(page)
    if not found:
        raise UsageError(
            f"no report.html in {', '.join(map(str, directories))}; write one with "
            "`rlprobe report RESULTS_DIR` first"
        )
    entries = [
        Entry(name, [_line(page, out) for page in sorted(
            {page.path.resolve(): page for page in pages}.values(),
            key=lambda page: page.written, reverse=True)])
        for name, pages in sorted(found.items())
    ]  # fmt: skip
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlprobe.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable,
    )
    text = environment.get_template("overview.html.j2").render(
        entries=entries, t=words, css=Markup(asset("assets/page.css")),
        words=Markup(words.as_script()), script=Markup(asset("assets/text.js")),
    )  # fmt: skip
    replace_text(out, text)
    return out


def _line(page: history.Page, out: Path) -> Line:
    link = os.path.relpath(page.path.resolve(), out.resolve().parent)
    return Line(page.verdict, page.sentence, f"{page.written:%Y-%m-%d %H:%M} UTC", quote(link))
