"""Which tokens differ in which layers: a map of one sample's block outputs, as SVG text.

From ``compare/target/{stage}/token_sketches.parquet``, there where both sides captured sketches
per token. A cell is as dark as its error is many times the record's noise floor.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import polars as pl
from markupsafe import Markup, escape

from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.dumps.results import TOKEN_SKETCHES
from rlprobe.errors import DumpError, ReplayError
from rlprobe.judge.analysis import Finding
from rlprobe.judge.inputs import Results
from rlprobe.report import words
from rlprobe.roles import TARGET
from rlprobe.rollouts import hdf5
from rlprobe.store.read import Run

WIDTH, LEFT, TOP, BOTTOM, ROW = 520, 96, 6, 26, 16
#: More tokens and layers than this share cells; a cell shows the largest of what it holds.
COLUMNS, ROWS = 128, 40
#: Times the floor -> shade 1 to 5; below the first a cell is within noise.
SHADES = (1.0, 3.0, 10.0, 100.0, 1000.0)
_LAYER = re.compile(r"layers\.(\d+)(?:\.|$)")
_CALL = re.compile(r"(\.forward)\.\d+(?=\.|$)")
_SHOWN = 400


@dataclass(frozen=True)
class Heat:
    """A map and what is said below it."""

    stage: str
    svg: Markup
    sample: str
    #: The sample's decoded prompt and response; None where they are not in the store, or unwanted.
    prompt: str | None
    text: str | None
    tokens: int
    response_at: int | None
    shades: tuple[float, ...] = SHADES


def build(
    results: Results, finding: Finding, benchmark: Run, sample: str | None, *, texts: bool = True
) -> Heat | None:
    """The map of a stage that parts; None where tokens were not sketched.

    Args:
        results: where comparisons are.
        finding: the stage.
        benchmark: whose rollouts hold the text.
        sample: digest of the sample to show; by default the one that differs most.
        texts: whether its prompt and response are shown.

    Raises:
        DumpError: the table is damaged.
    """
    path = results.compared(TARGET, finding.stage.name) / TOKEN_SKETCHES
    lazy = results.table(TARGET, finding.stage.name, TOKEN_SKETCHES)
    if lazy is None:
        return None
    try:
        table = lazy.filter(pl.col("step") == finding.stage.step).collect()
        floors = finding.stage.rows.select("name", "floor").unique("name", keep="first")
        table = table.join(floors, on="name", how="left").with_columns(
            times=pl.col("error") / pl.col("floor")
        )
        table = table.filter(pl.col("times").is_not_null())
    except UNREADABLE as error:
        raise DumpError(f"{path} is not readable: {error}; compare again") from error
    if table.is_empty():
        return None
    if sample is None or table.filter(pl.col("sample") == sample).is_empty():
        sample = str(table.sort("times", descending=True, nulls_last=True).item(0, "sample"))
    own = table.filter(pl.col("sample") == sample)
    first = own.get_column("occurrence").min()
    own = own.filter(pl.col("occurrence") == first)
    at = own.get_column("response_at").drop_nulls()
    prompt, response = _texts(benchmark, finding.stage.step, sample) if texts else (None, None)
    return Heat(
        stage=finding.stage.name,
        svg=_drawn(own),
        sample=sample,
        prompt=prompt,
        text=response,
        tokens=int(own.get_column("token").n_unique()),
        response_at=int(at[0]) if len(at) else None,
    )


def _texts(run: Run, step: int, sample: str) -> tuple[str | None, str | None]:
    path = run.rollouts.get(step)
    if path is None:
        return None, None
    try:
        samples = hdf5.read(path).samples
    except ReplayError:
        return None, None  # the gate says that they cannot be read
    for one in samples:
        if one.sample_digest == sample:
            return _cut(one.prompt_text), _cut(one.response_text)
    return None, None


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def _drawn(table: pl.DataFrame) -> Markup:
    names = table.sort("order").get_column("name").unique(maintain_order=True).to_list()
    # a block runs once a forward (decoding: once a token), and is one row
    blocks = list(dict.fromkeys(map(_block, names)))
    per_row = max(1, math.ceil(len(blocks) / ROWS))
    row_of = {name: blocks.index(_block(name)) // per_row for name in names}
    last = int(table.get_column("token").max() or 0)  # type: ignore[arg-type]
    per_cell = max(1, math.ceil((last + 1) / COLUMNS))
    columns = last // per_cell + 1
    rows = max(row_of.values()) + 1
    height = TOP + rows * ROW + BOTTOM
    width = (WIDTH - LEFT - 4) / columns
    cells: dict[tuple[int, int], tuple[float, str, int]] = {}
    for name, token, times in table.select("name", "token", "times").iter_rows():
        key = (row_of[name], token // per_cell)
        if key not in cells or not times <= cells[key][0]:
            cells[key] = (times, name, token)
    parts: list[str] = [_label(blocks[row * per_row], row) for row in range(rows)]
    for (row, column), (times, name, token) in sorted(cells.items()):
        said = escape(f"{name}: token {token}, {times:.3g} ×")
        parts.append(
            f'<rect class="h{shade(times)}" x="{LEFT + column * width:.1f}" y="{TOP + row * ROW}" '
            f'width="{max(width - 0.4, 0.6):.1f}" height="{ROW - 1}"><title>{said}</title></rect>'
        )
    for column in range(0, columns, max(1, math.ceil(columns / 8))):
        parts.append(
            f'<text class="tick" x="{LEFT + column * width:.1f}" y="{height - 8}">'
            f"{column * per_cell}</text>"
        )
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img"{words.label("heat_drawn")}>'
        + "".join(parts)
        + "</svg>"
    )


def shade(times: float) -> int:
    """0 within noise, 1 to 5 beyond it; what is not finite is the darkest."""
    if not math.isfinite(times):
        return len(SHADES)
    return sum(times > limit for limit in SHADES)


def _block(name: str) -> str:
    """A record's name without the number of its call."""
    return _CALL.sub(r"\1", name)


def _label(name: str, row: int) -> Markup:
    match = _LAYER.search(name)
    text = words.drawn("layer", n=match[1]) if match else escape(name.split(".")[-4:][0][:16])
    return Markup('<text class="tick" x="2" y="{}">{}</text>').format(TOP + row * ROW + 12, text)
