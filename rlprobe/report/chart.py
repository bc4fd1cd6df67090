"""Charts as SVG text: no script, no network, and sharp on paper.

Everything that comes from a dump is escaped; colours are CSS variables of the page, so that a chart
follows light and dark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl
from markupsafe import Markup, escape

from rlprobe.judge.roundoff import UNIT
from rlprobe.report import words

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 14, 34
#: Columns that points are gathered into: more cannot be told apart.
BINS = 240
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Point:
    """One record."""

    place: int
    error: float
    floor: float | None
    beyond: bool
    name: str


def error_against_depth(rows: pl.DataFrame, marked: str | None = None) -> Markup | None:
    """Relative error of every judged record in execution order, over the noise band.

    Args:
        rows: a stage's rows (:mod:`rlprobe.judge.tables`).
        marked: name of the record that parts first.

    Returns:
        an ``<svg>``; None where there is nothing to draw.
    """
    shown = rows.filter(
        pl.col("judged")
        & pl.col("error").is_not_null()
        # A loss near 0 differs by any multiple of itself, and has no depth.
        & ~pl.col("slot").is_in(["parameters", "loss"])
        & pl.col("floor").is_not_null()
        # Integers are the same or not: they have no place in a band of round-off.
        & pl.col("dtype_benchmark").is_in(list(UNIT))
    ).with_row_index("at")
    if shown.is_empty():
        return None
    points = [
        Point(place, float(error), floor, beyond, name)
        for place, error, floor, beyond, name in shown.select(
            "at", "error", "floor", "beyond", "name"
        ).iter_rows()
    ]
    visible = [p for p in points if 0 < p.error < math.inf]
    floors = [p.floor for p in points if p.floor and math.isfinite(p.floor)]
    low, high = _range([p.error for p in visible], floors)
    scale = _Scale(len(points), low, high)
    parts = [_grid(scale), _band(points, scale), _layers(shown, scale)]
    parts.append(_points(_thinned(points, scale), scale))
    first = next((p for p in points if p.name == marked and p.beyond), None)
    if first is not None:
        parts.append(_mark(first, scale))
    title = words.label("depth_drawn", n=f"{len(points):,}")
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"{title}>'
        + "".join(parts)
        + "</svg>"
    )


@dataclass(frozen=True)
class _Scale:
    count: int
    low: float
    high: float

    def x(self, place: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / max(self.count, 1)

    def y(self, value: float) -> float:
        """Vertical position of an error; what is 0 or below the range lies on the axis."""
        level = math.log10(min(max(value, self.low), self.high))
        share = (level - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _range(errors: Sequence[float], floors: Sequence[float]) -> tuple[float, float]:
    """Whole decades around what is drawn."""
    values = [*errors, *floors] or [1e-7]
    low = 10.0 ** math.floor(math.log10(max(min(values), 1e-12)))
    high = 10.0 ** math.ceil(math.log10(max(*values, low * 100)) + 1e-9)
    return low, min(high, 1e12)


def _grid(scale: _Scale) -> str:
    decades = round(math.log10(scale.high / scale.low))
    every = max(1, math.ceil(decades / 6))
    parts = []
    for number in range(0, decades + 1, every):
        exponent = round(math.log10(scale.low)) + number
        y = scale.y(10.0**exponent)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"1e{exponent}</text>"
        )
    return "".join(parts)


def _band(points: Sequence[Point], scale: _Scale) -> str:
    """The noise band: everything below the floor."""
    step = max(1, len(points) // (2 * BINS))
    corners = []
    last: float | None = None
    for point in points[::step]:
        if point.floor:
            last = point.floor
        if last is not None:
            corners.append(f"{scale.x(point.place):.1f},{scale.y(last):.1f}")
    if not corners:
        return ""
    bottom = HEIGHT - BOTTOM
    line = " ".join(corners)
    first, end = corners[0].split(",")[0], corners[-1].split(",")[0]
    return (
        f'<polygon class="band" points="{first},{bottom} {line} {end},{bottom}"/>'
        f'<polyline class="floor" points="{line}"/>'
    )


def _layers(shown: pl.DataFrame, scale: _Scale) -> str:
    """Where each layer begins, forward; a few of them when there are many."""
    starts: dict[str, int] = {}
    phases = shown.select("at", "module", "direction", "phase").iter_rows()
    previous = None
    for at, module, direction, phase in phases:
        label = {"forward": "", "backward": "backward", "update": "update"}.get(direction, "")
        if label and label != previous:
            starts.setdefault(label, at)
        previous = label
        match = _LAYER.search(module or "")
        if match and direction == "forward" and phase == 0:
            starts.setdefault(f"L{match[1]}", at)
    names = [name for name in starts if name.startswith("L")]
    every = max(1, math.ceil(len(names) / 8))
    kept = [*names[::every], *(name for name in starts if not name.startswith("L"))]
    parts = []
    taken = -1000.0
    for name in sorted(kept, key=lambda name: starts[name]):
        x = scale.x(starts[name])
        if x - taken < 26:
            continue
        taken = x + 6.0 * max(0, len(name) - 2)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">'
            f"{escape(name) if name.startswith('L') else words.drawn(name)}</text>"
        )
    return "".join(parts)


def _thinned(points: Sequence[Point], scale: _Scale) -> list[Point]:
    """Per column the largest and smallest error and whatever is beyond its floor, at most a few."""
    if len(points) <= 3 * BINS:
        return list(points)
    kept: dict[int, Point] = {}
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(point.place * BINS // scale.count, []).append(point)
    for column in columns.values():
        beyond = sorted((p for p in column if p.beyond), key=lambda p: p.error)
        for point in (*beyond[:1], *beyond[-2:]):
            kept[point.place] = point
        for chosen in (max, min):
            point = chosen(column, key=lambda p: p.error)
            kept[point.place] = point
    return [kept[place] for place in sorted(kept)]


def _points(points: Iterable[Point], scale: _Scale) -> str:
    parts = []
    for point in points:
        kind = "beyond" if point.beyond else "equal" if point.error == 0 else "within"
        radius = 3.2 if point.beyond else 2.0
        floor = f" / {point.floor:.2g}" if point.floor is not None else ""
        said = escape(f"{point.name}: {point.error:.3g}{floor}")
        parts.append(
            f'<circle class="{kind}" cx="{scale.x(point.place):.1f}" '
            f'cy="{scale.y(point.error):.1f}" r="{radius}"><title>{said}</title></circle>'
        )
    return "".join(parts)


def _mark(point: Point, scale: _Scale) -> str:
    x = scale.x(point.place)
    anchor = "end" if x > WIDTH / 2 else "start"
    shift = -6 if anchor == "end" else 6
    return (
        f'<line class="first" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="first" x="{x + shift:.1f}" y="{TOP + 10}" text-anchor="{anchor}">'
        f"{words.drawn('parts_here')}</text>"
    )


def by_position(series: Sequence[tuple[str, Sequence[float]]], bar: float | None = None) -> Markup:
    """Lines over response positions, one a run, on a logarithmic axis."""
    values = [v for _, line in series for v in line if v > 0]
    low, high = _range(values, [bar] if bar else [])
    count = max((len(line) for _, line in series), default=1)
    scale = _Scale(count, low, high)
    parts = [_grid(scale)]
    if bar is not None:
        y = scale.y(bar)
        parts.append(
            f'<line class="bar" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    for number, (name, line) in enumerate(series):
        corners = " ".join(f"{scale.x(i):.1f},{scale.y(v):.1f}" for i, v in enumerate(line))
        parts.append(
            f'<polyline class="series s{number}" points="{corners}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    for place in range(0, count, max(1, math.ceil(count / 8))):
        parts.append(
            f'<text class="tick" x="{scale.x(place):.1f}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{place}</text>'
        )
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f"{words.label('position_drawn')}>" + "".join(parts) + "</svg>"
    )
