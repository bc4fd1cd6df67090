"""Write the page: one HTML file that holds its data, styles and scripts, and asks for nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from rlprobe.diagnose import diagnosis
from rlprobe.files import replace_text
from rlprobe.judge import tables
from rlprobe.judge.inputs import Results, require
from rlprobe.report import history, payload, spreadsheet, words
from rlprobe.report.content import Page, gather
from rlprobe.report.narrowed import Narrowed
from rlprobe.report.printable import printable
from rlprobe.roles import BENCHMARK, TARGET

NAME = "report.html"
#: In the order in which a browser must meet them.
_SCRIPTS = (
    "vendor/tabulator.min.js",
    "vendor/uplot.min.js",
    "assets/text.js",
    "assets/records.js",
    "assets/detail.js",
    "assets/chart.js",
    "assets/curves.js",
    "assets/tree.js",
    "assets/start.js",
)
_STYLES = ("vendor/tabulator.min.css", "vendor/uplot.min.css", "assets/page.css")


def write(directory: Path, *, texts: bool = True) -> Path:
    """Write ``RESULTS_DIR/report.html`` from its diagnosis, judged tables and runs, and
    ``records.csv`` beside it.

    Args:
        directory: RESULTS_DIR, diagnosed.
        texts: whether prompts and responses are on the page.

    Raises:
        DumpError, StoreError: a file or run is missing or damaged.
    """
    results = Results.open(directory)
    found = diagnosis.answer(directory)
    benchmark, target = require(results, BENCHMARK), require(results, TARGET)
    judged = Narrowed(results, None if found.first is None else found.first.rank)
    step = tables.read(results, found.judged, judged.rows)
    content = gather(results, found, step, benchmark, target, texts=texts, judged=judged)
    path = directory / NAME
    history.keep(path, content.runs)
    spreadsheet.write(directory / spreadsheet.NAME, content.records)
    replace_text(path, history.sealed(render(content)))
    return path


def render(page: Page) -> str:
    """The page as HTML; every text in it is escaped, and it names nothing outside itself."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlprobe.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable,
    )
    environment.filters["number"] = number
    environment.filters["breakable"] = breakable
    scripts = ";\n".join(asset(name) for name in _SCRIPTS)
    return environment.get_template("page.html.j2").render(
        page=page,
        t=words,
        css=Markup("\n".join(asset(name) for name in _STYLES)),
        scripts=Markup(scripts),
        words=Markup(words.as_script()),
        payload=Markup(payload.pack(page.records, **page.live)),
    )


def asset(name: str) -> str:
    """The text of a file that the page holds."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def number(value: Any, digits: int = 3) -> str:
    """A number with some significant digits; a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "∞" if value > 0 else str(value)
    return f"{value:.{digits}g}"


def breakable(text: str) -> Markup:
    """Escaped text that may break after a dot or an underscore."""
    escaped = str(escape(printable(text)))
    return Markup(escaped.replace("_", "_<wbr>").replace(".", ".<wbr>"))
