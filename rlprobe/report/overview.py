"""Many alignments on one page: the newest verdict of each, and those before it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from rlprobe import files
from rlprobe.diagnose import diagnosis
from rlprobe.errors import DumpError, UsageError
from rlprobe.files import replace_text
from rlprobe.report import history, words
from rlprobe.report.page import NAME as NEWEST
from rlprobe.report.page import asset
from rlprobe.report.printable import printable

NAME = "overview.html"
_AGAIN = "`rlprobe report RESULTS_DIR` writes it again"


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


def write(directories: Sequence[Path], out: Path) -> list[str]:
    """Write a page about several results directories.

    Args:
        directories: RESULTS_DIRs with ``report.html``, or directories of such.
        out: the file to write; links are relative to it.

    Returns:
        Why pages among them are not to be believed, a sentence each; the page says it as well.

    Raises:
        UsageError: there is no page in any of them.
    """
    found: dict[str, list[history.Page]] = {}
    wrong: dict[Path, str] = {}
    for directory in directories:
        places = [directory, *sorted(p.parent for p in directory.glob("*/report.html"))]
        for place in places:
            for page in history.pages(place):
                found.setdefault(page.name, []).append(page)
                if why := _wrong(page, place):
                    wrong[page.path] = why
    if not found:
        raise UsageError(
            f"no report.html in {', '.join(map(str, directories))}; write one with "
            "`rlprobe report RESULTS_DIR` first"
        )
    entries = [
        Entry(name, [_line(page, out, wrong.get(page.path)) for page in sorted(
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
    return list(wrong.values())


def _wrong(page: history.Page, place: Path) -> str | None:
    """Why a page is not to be believed: it was damaged, or is not of the diagnosis beside it."""
    try:
        if not history.is_whole(page.path):
            return f"{page.path} is not what was written: it was changed or damaged; {_AGAIN}"
        if page.path.name != NEWEST or not (place / diagnosis.NAME).exists():
            return None  # of an earlier one, nothing else is left
        found = diagnosis.answer(place)
        named = page.diagnosis or files.digest(place / diagnosis.NAME).sha256
        said = (page.verdict, page.sentence)
    except (OSError, DumpError) as error:
        return str(error)
    shown = (found.verdict, printable(found.sentence))
    if said != shown or files.digest(place / diagnosis.NAME).sha256 != named:
        return f"{page.path} does not show the {diagnosis.NAME} beside it; {_AGAIN}"
    return None


def _line(page: history.Page, out: Path, wrong: str | None) -> Line:
    link = os.path.relpath(page.path.resolve(), out.resolve().parent)
    written = f"{page.written:%Y-%m-%d %H:%M} UTC"
    if wrong is not None:
        return Line(diagnosis.NOT_COMPARABLE, wrong, written, quote(link))
    return Line(page.verdict, page.sentence, written, quote(link))
