"""Key data of a stage's later updates: judged by themselves, against the floors that hold there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.dumps.key_data import Row
from rlprobe.judge import judge, keydata, reasons, sources, tables
from rlprobe.judge.analysis import OUTCOME, Finding, Step
from rlprobe.judge.stage import Stage
from tests.unit.diagnose.test_later_updates import compared, judged

NAME = "update_log_probs"
STAGE = "actor_update"


def difference(name: str, **target: Any) -> keydata.Difference:
    """Four samples' log-probs; of the target one value is another."""
    values = np.linspace(-6.0, -0.5, 40)
    left, right = ([Row(f"s{n}", values.copy(), 0, n) for n in range(4)] for _ in range(2))
    for at, value in target.items():
        right[2].values[int(at.removeprefix("at"))] = value
    return keydata.compare(left, right, name, 0)


def finding(late: keydata.Difference, table: pl.DataFrame | None = None) -> Finding:
    process = judged(compared("split_k") if table is None else table)
    stage = Stage(STAGE, 0, [process], before_update=2)
    early = difference(NAME)
    return judge._finding(
        stage, {NAME: early, NAME + keydata.LATER: late}, judge._Asked(False, True)
    )


def test_they_are_judged_against_the_wider_floor_of_what_they_inherit() -> None:
    found = finding(difference(NAME + keydata.LATER))
    floors = {outcome.name: outcome.floor for outcome in found.produced}
    assert found.origin is None
    assert 0 < floors[NAME] < floors[NAME + keydata.LATER] < 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -3.0])
def test_one_value_of_a_later_update_is_found(value: float) -> None:
    found = finding(difference(NAME + keydata.LATER, at0=value))
    assert found.origin is not None and found.origin.kind == OUTCOME
    assert found.origin.operator == NAME + keydata.LATER
    assert ("not finite at 1 of 160 values" in found.origin.reason) == (not np.isfinite(value))


def test_what_parts_in_an_update_parts_before_what_the_next_one_hands_on() -> None:
    found = finding(difference(NAME + keydata.LATER, at0=-3.0), compared("adam_eps"))
    assert found.origin is not None and found.origin.kind != OUTCOME


def test_where_later_updates_are_not_judged_neither_are_they_and_it_is_said() -> None:
    table = compared("split_k").filter(pl.col("slot") != "change")
    late = difference(NAME + keydata.LATER, at0=-3.0)
    found = finding(late, table)
    assert found.origin is None
    assert [outcome.name for outcome in found.produced] == [NAME]
    step = Step(0, {STAGE: found}, {NAME: difference(NAME), late.name: late})
    rows = tables._key_data_table(step, STAGE, found)
    said = dict(rows.select("name", "unjudged_because").iter_rows())
    assert said == {NAME: None, late.name: reasons.AFTER_UPDATE}
    lopsided = finding(difference(NAME + keydata.LATER, at0=float("nan")), table)
    assert lopsided.origin is not None, "what is not finite needs no floor"


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("side", ["benchmark", "target"])
def test_a_side_without_any_of_one_of_the_updates_is_said(
    monkeypatch: pytest.MonkeyPatch, side: str, lacking: int
) -> None:
    """It has rows of the other update, so that the name is not on one side only."""
    values = [Row(f"s{n}", np.linspace(-3.0, -1.0, 5), 0, n) for n in range(2)]
    sides = {"benchmark": values, "target": values} | {side: [values[1 - lacking]]}
    read = [SimpleNamespace(data={NAME: 0}, rows=lambda _, rows=rows: rows)
               for rows in (sides["benchmark"], sides["target"])]  # fmt: skip
    monkeypatch.setattr(sources, "both", lambda *_: read)
    monkeypatch.setattr(judge, "_worst", lambda _, *rest: keydata.compare(*rest))
    found = judge.key_data(SimpleNamespace(of_dumps=False), 0, {STAGE: 1})  # type: ignore[arg-type]
    names = [NAME, NAME + keydata.LATER]
    assert list(found) == names
    lone = found[names[lacking]]
    assert (lone.joined, lone.error) == (0, None)
    assert (lone.benchmark_only, lone.target_only) == ((0, 1) if side == "benchmark" else (1, 0))
    assert found[names[1 - lacking]].joined == 1


def test_they_belong_to_the_stage_of_their_name() -> None:
    assert keydata.stage_of(NAME + keydata.LATER) == STAGE
    assert keydata.result_of(NAME + keydata.LATER) == STAGE
    assert keydata.result_of("advantages") is None
