"""Write the page."""

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
from rlprobe.report.content import Page, gather
from rlprobe.roles import BENCHMARK, TARGET

NAME = "report.html"


def write(directory: Path) -> Path:
    """Write ``RESULTS_DIR/report.html`` from its diagnosis, comparisons and runs.

    Raises:
        DumpError, StoreError: a file or run is missing or damaged.
    """
    results = Results.open(directory)
    found = diagnosis.read(directory / diagnosis.NAME)
    benchmark, target = require(results, BENCHMARK), require(results, TARGET)
    step = tables.read(results, found.judged)
    text = render(gather(results, found, step, benchmark, target))
    path = directory / NAME
    replace_text(path, text)
    return path


def render(page: Page) -> str:
    """The page as HTML; every text in it is escaped, and it names nothing outside itself."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlprobe.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
    )
    environment.filters["number"] = number
    environment.filters["breakable"] = breakable
    css = (Path(__file__).parent / "templates" / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(page=page, css=Markup(css))


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
    escaped = str(escape(_printable(text)))
    return Markup(escaped.replace("_", "_<wbr>").replace(".", ".<wbr>"))


def _printable(value: Any) -> Any:
    """Control characters of decoded text or hostile names never reach the page."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value
    )
