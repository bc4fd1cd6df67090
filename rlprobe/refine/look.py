"""What two tensors of the same record say about their difference, element by element.

A sketch gives the size of a difference; the tensors give its shape. Each question is a fit or an
equality with a share of the difference that it explains, and an answer needs nearly all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Share of the difference's square that a law must explain to be named.
_EXPLAINED = 0.98
#: Share of the error that the places named must hold.
_HELD = 0.99
#: Share of elements that must be the benchmark's rounded: values of a shorter format still are
#: numbers of a longer one.
_MOSTLY = 0.5
#: Equal within round-off of another kernel, relative to the largest value.
_EQUAL = 1e-5
#: More columns than this are not matched with one another.
_COLUMNS = 8192


@dataclass
class Look:
    """What was seen."""

    #: Relative L2 difference.
    error: float
    #: A cause class; None where no law explains the difference.
    cause: str | None = None
    #: The law in words, and the share of the difference's square that it leaves.
    law: str = ""
    left: float = 1.0
    evidence: list[str] = field(default_factory=list)
    #: Rows (tokens) that hold the error, ascending; empty: all alike.
    rows: list[int] = field(default_factory=list)
    #: Likewise of the last dimension.
    channels: list[int] = field(default_factory=list)
    tokens: int = 0

    def say(self, cause: str | None, left: float, said: str) -> None:
        """Add evidence; the first law that explains the difference names the cause."""
        self.evidence.append(said)
        if self.cause is None and cause is not None:
            self.cause, self.left, self.law = cause, left, said


def look(benchmark: npt.NDArray[np.generic], target: npt.NDArray[np.generic]) -> Look:
    """Compare two tensors of one shape, [..., tokens, channels].

    Raises:
        ValueError: the shapes differ.
    """
    if benchmark.shape != target.shape:
        raise ValueError(f"shapes {benchmark.shape} and {target.shape}")
    b, t = (np.atleast_2d(_rows(x.astype(np.float64))) for x in (benchmark, target))
    d = t - b
    finite = np.isfinite(d)
    if not finite.all():
        found = Look(float("inf"), tokens=len(b))
        places = np.flatnonzero(~finite.all(axis=1))
        found.rows = [int(i) for i in places]
        wrong = int(np.count_nonzero(np.isfinite(b) & ~np.isfinite(t)))
        found.say(
            "nonfinite", 0.0,
            f"{wrong} elements are not finite on the target alone, first in row {places[0]}",
        )  # fmt: skip
        return found
    scale = float(np.linalg.norm(b))
    error = float(np.linalg.norm(d)) / scale if scale else float(np.any(d))
    found = Look(error, tokens=len(b))
    if not np.any(d):
        found.evidence.append("the tensors are equal")
        return found
    _rounded(found, b, t)
    _scaled(found, b, d)
    _moved(found, b, t)
    _by_row(found, b, d)
    _added(found, b, d)
    _places(found, d)
    return found


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(-1, 1)


def _explained(d: Array, model: Array) -> float:
    """Share of d's square that the model takes away."""
    whole = float(np.sum(d * d))
    return 1.0 - float(np.sum((d - model) ** 2)) / whole


def coarse(x: Array) -> Iterator[tuple[str, Array]]:
    """The values in each coarser format, by name."""
    single = x.astype(np.float32)
    bits = single.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    yield "bfloat16", kept.view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        yield "float16", single.astype(np.float16).astype(np.float64)


def _rounded(found: Look, b: Array, t: Array) -> None:
    for (name, of_b), (_, of_t) in zip(coarse(b), coarse(t), strict=True):
        if np.mean(of_b == b) > 0.5:
            continue  # the benchmark's own format
        if np.array_equal(of_t, t) and np.mean(of_b == t) > _MOSTLY:
            found.say(
                "rounding_order", 0.0,
                f"every element of the target is a {name} number, and {np.mean(of_b == t):.1%} are "
                f"the benchmark's element rounded to {name}",
            )  # fmt: skip
            return
        share = _explained(t - b, of_b - b)
        if share > _EXPLAINED:
            found.say(
                "rounding_order", 1.0 - share,
                f"rounding the benchmark's elements to {name} explains {share:.2%} of the "
                "difference",
            )  # fmt: skip
            return


def _scaled(found: Look, b: Array, d: Array) -> None:
    factor = float(np.sum(b * d) / np.sum(b * b)) if np.any(b) else 0.0
    share = _explained(d, factor * b)
    if share > _EXPLAINED:
        found.say(
            "constant_factor", 1.0 - share,
            f"the target is {1 + factor:.7g} times the benchmark: that explains {share:.2%} of the "
            "difference",
        )  # fmt: skip


def _moved(found: Look, b: Array, t: Array) -> None:
    """The same numbers in other places: rows or columns in another order."""
    tolerance = _EQUAL * float(np.abs(b).max())
    if found.error < 0.05 or not np.allclose(
        np.sort(b, axis=None), np.sort(t, axis=None), rtol=0, atol=tolerance
    ):
        return
    for name, one, other in (("channels", b.T, t.T), ("rows", b, t)):
        order = _order(one, other, tolerance)
        if order is not None:
            moved = int(np.count_nonzero(order != np.arange(len(order))))
            cause = "layout" if name == "channels" else "row_order"
            found.say(cause, 0.0, f"{moved} of {len(order)} {name} stand in other places: "
                      f"{_described(order)}")  # fmt: skip
            return
    found.say("layout", 0.0, "the target holds the benchmark's numbers in other places")


def _order(one: Array, other: Array, tolerance: float) -> npt.NDArray[np.int64] | None:
    """Where each row of ``other`` comes from in ``one``; None where one comes from nowhere."""
    if not 1 < len(one) <= _COLUMNS:
        return None
    # One random projection tells rows apart; whether they are the same is checked in full.
    direction = np.random.default_rng(0).standard_normal(one.shape[1])
    keys = [np.argsort(x @ direction, kind="stable") for x in (one, other)]
    if not np.allclose(one[keys[0]], other[keys[1]], rtol=0, atol=tolerance):
        return None
    order = np.empty(len(one), dtype=np.int64)
    order[keys[1]] = keys[0]
    return order


def _described(order: npt.NDArray[np.int64]) -> str:
    steps = np.unique((order - np.arange(len(order))) % len(order))
    if len(steps) == 1:
        return f"moved round by {int(steps[0])}"
    runs = np.flatnonzero(np.diff(order) != 1)
    block = int(np.gcd.reduce(np.append(runs + 1, len(order))))
    if block > 1:
        blocks = order[::block] // block
        shown = ", ".join(str(int(i)) for i in blocks[:8])
        return f"blocks of {block} in the order {shown}{', …' if len(blocks) > 8 else ''}"
    shown = ", ".join(str(int(i)) for i in order[:8])
    return f"the first come from {shown}"


def _by_row(found: Look, b: Array, d: Array) -> None:
    """Each row multiplied by a factor of its own: a norm, or another weight of each token."""
    squares = np.sum(b * b, axis=1)
    factors = np.where(squares > 0, np.sum(b * d, axis=1) / np.maximum(squares, 1e-300), 0.0)
    share = _explained(d, factors[:, None] * b)
    if found.cause is None and share > _EXPLAINED and b.shape[1] > 1:
        low, high = 1 + factors.min(), 1 + factors.max()
        found.say(
            None, 1.0,
            f"each token is multiplied by a factor of its own, {low:.6g} to {high:.6g}: that "
            f"explains {share:.2%} of the difference",
        )  # fmt: skip


def _added(found: Look, b: Array, d: Array) -> None:
    """The same vector added to each row: a bias."""
    vector = d.mean(axis=0)
    share = _explained(d, np.broadcast_to(vector, d.shape))
    if found.cause is None and share > _EXPLAINED and len(b) > 1:
        found.say(
            None, 1.0,
            f"the same vector (norm {np.linalg.norm(vector):.4g}) is added to every token: that "
            f"explains {share:.2%} of the difference: a bias left out or added twice",
        )  # fmt: skip


def _places(found: Look, d: Array) -> None:
    for name, energy in (("rows", (d * d).sum(axis=1)), ("channels", (d * d).sum(axis=0))):
        order = np.argsort(energy)[::-1]
        held = np.cumsum(energy[order]) / energy.sum()
        count = int(np.searchsorted(held, _HELD)) + 1
        if count > len(energy) // 2:
            continue
        places = sorted(int(i) for i in order[:count])
        setattr(found, name, places)
        plain = "tokens" if name == "rows" else "channels"
        found.evidence.append(
            f"{count} of {len(energy)} {plain} hold {_HELD:.0%} of the difference: "
            f"{_listed(places)}"
        )


def _listed(places: list[int]) -> str:
    if len(places) > 2 and places[-1] - places[0] == len(places) - 1:
        return f"{places[0]} to {places[-1]}"
    shown = ", ".join(map(str, places[:6]))
    return f"{shown}, …" if len(places) > 6 else shown
