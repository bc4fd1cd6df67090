"""A side that does not make the suspect record again is random, where chance is of that size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.refine import repeated
from rlprobe.refine.suspects import Plan
from rlprobe.spec import Suspects

SUSPECTS = Suspects("actor_update", 0, 0, (), (), "b", trace="update")
PLAN = Plan(SUSPECTS, "diagnosed b", "diagnosed t")
RNG = np.random.default_rng(0)
EXACT, NOISE, OTHER = (RNG.standard_normal(61) for _ in range(3))


def table(*sketches: Any) -> pl.DataFrame:
    """Records a, b, c of a run by their sketches."""
    rows = [np.asarray(row, dtype=np.float64) for row in sketches]
    norms = [float(np.linalg.norm(row)) for row in rows]
    return pl.DataFrame({
        "name": ["a", "b", "c"], "order": [0, 1, 2], "sketch": [row.tolist() for row in rows],
        "max": norms, "min": norms, "mean": norms, "norm": norms, "order_in_name": [0, 0, 0],
    })  # fmt: skip


def run(key: str) -> Any:
    return SimpleNamespace(key=key, store="store")


def found(monkeypatch: pytest.MonkeyPatch, tables: dict[str, pl.DataFrame]) -> Any:
    monkeypatch.setattr(repeated, "_numbers", lambda run, _: tables[run.key])
    monkeypatch.setattr(repeated, "Run", SimpleNamespace(open=lambda _, key: run(key)))
    return repeated.by_chance([run("b"), run("t")], PLAN, SUSPECTS)


BENCHMARK = table(EXACT, EXACT, EXACT)


@pytest.mark.parametrize(
    ("diagnosed", "again", "is_chance"),
    [
        (EXACT + 0.1 * NOISE, EXACT + 0.1 * OTHER, True),
        (EXACT + 0.1 * NOISE, EXACT, True),
        (EXACT + 0.1 * NOISE, EXACT + 0.1 * NOISE, False),
        # noise beside something that is wrong each time
        (2 * EXACT + 0.1 * NOISE, 2 * EXACT + 0.1 * OTHER, False),
    ],
)
def test_chance_must_be_of_the_size_of_the_difference(
    monkeypatch: pytest.MonkeyPatch, diagnosed: Any, again: Any, is_chance: bool
) -> None:
    tables = {
        "diagnosed b": BENCHMARK, "b": BENCHMARK,
        "diagnosed t": table(EXACT, diagnosed, diagnosed), "t": table(EXACT, again, again),
    }  # fmt: skip
    seen = found(monkeypatch, tables)
    assert (seen is not None) is is_chance
    if seen is not None:
        assert seen.cause == "nondeterministic" and "the target makes other numbers of b" in (
            seen.statement
        )
    swapped = {name: tables[name[:-1] + ("t" if name[-1] == "b" else "b")] for name in tables}
    other = found(monkeypatch, swapped)
    assert (other is not None) is is_chance
    assert other is None or "the benchmark makes other numbers of b" in other.statement


def test_what_parts_before_or_on_both_sides_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy, other = EXACT + 0.1 * NOISE, EXACT + 0.1 * OTHER
    tables = {
        "diagnosed b": BENCHMARK, "b": BENCHMARK,
        "diagnosed t": table(EXACT, noisy, EXACT), "t": table(other, other, EXACT),
    }  # fmt: skip
    assert found(monkeypatch, tables) is None, "what it was given was random already"
    tables |= {"t": table(EXACT, other, EXACT), "b": table(EXACT, noisy, EXACT)}
    assert found(monkeypatch, tables) is None, "both sides are"
