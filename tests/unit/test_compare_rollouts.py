"""Rollouts as frameworks keep them: compared sample by sample."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.cli import main
from tests.unit.compare_helpers import compared
from tests.unit.rollout_lines import both, differing, line, one, put

CASES = Path(__file__).parent / "cases/rollouts"


def test_the_same_rollouts_are_identical(tmp_path: Path) -> None:
    lines = [line(n) for n in range(6)]
    result = both(tmp_path, lines, lines)
    assert result.lack is None and differing(result) == {}
    # input, output, gts, score and acc of each; the step is the run's
    assert (result.summary["compared"], result.summary["identical"]) == (30, 30)


def test_samples_meet_whatever_their_order_and_their_requests(tmp_path: Path) -> None:
    lines = [line(n, request_id=f"b{n}", uid=f"u{n}") for n in range(8)]
    other = [line(n, request_id=f"t{n}", uid=f"v{n}") for n in reversed(range(8))]
    result = both(tmp_path, lines, other)
    assert differing(result) == {}
    assert any("request_id" in note and "uid" in note for note in result.summary["notes"])


def test_another_response_of_a_prompt_meets_the_one_that_is_left(tmp_path: Path) -> None:
    lines = [line(0, input="q"), line(1, input="q"), line(2, input="q")]
    other = [
        line(2, input="q"),
        line(1, input="q", output="no idea", score=0.0),
        line(0, input="q"),
    ]
    result = both(tmp_path, lines, other)
    assert differing(result) == {"output": [1.0], "score": [1.0]}
    (row,) = result.records.filter((pl.col("index") == "output") & (pl.col("error") > 0)).to_dicts()
    assert (row["value_benchmark"], row["value_target"]) == ("the answer is 1", "no idea")


def test_a_score_of_the_same_response_is_measured(tmp_path: Path) -> None:
    result = both(tmp_path, [line(4)], [line(4, score=1.5)])
    assert differing(result) == {"score": [0.5]}


def test_a_prompt_on_one_side_alone_costs_coverage(tmp_path: Path) -> None:
    lines = [line(n) for n in range(4)]
    result = both(tmp_path, lines, [*lines[:2], line(8), line(9)])
    assert result.summary["counts"]["benchmark_only"] == 10
    assert result.summary["coverage"] == {"benchmark": 0.5, "target": 0.5}
    assert result.lack is not None and "the target has no such record" in str(result.lack)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ('{"input": "q", "output": ', "not JSON"),
        ('["input"]', "accepted: a mapping"),
        ('{"input": "q", "score": 1}', "there is no 'output'"),
        ('{"input": "q", "output": "a", "score": 1, "score": 2}', "key 'score' stands twice"),
    ],
)
def test_a_broken_line_costs_one_sample(tmp_path: Path, broken: str, why: str) -> None:
    lines = [line(n) for n in range(20)]
    result = both(tmp_path, lines, [*lines, broken])
    assert result.summary["compared"] == 100 and differing(result) == {}
    assert result.summary["counts"]["unreadable"] == 1
    (row,) = result.records.filter(status="unreadable").to_dicts()
    assert why in row["reason"] and row["name"] == "Rollout.unread.line21"


def test_values_of_every_kind_are_exact(tmp_path: Path) -> None:
    extra = {
        "large": 2**63 + 1, "nan": float("nan"), "none": None, "nested": {"a": [1, {"b": "x"}]},
        "numbers": [0.5, None, -1.0], "text": "\U0001f600 \u4e2d", "empty": [], "flag": True,
    }  # fmt: skip
    changed = extra | {"large": 2**63 + 3, "nested": {"a": [1, {"b": "y"}]}, "flag": False}
    result = both(tmp_path, [line(0, **extra)], [line(0, **changed)])
    errors = differing(result)
    assert set(errors) == {"large", "nested.a.1.b", "flag"}
    assert errors["large"] == [pytest.approx(2 / 2**63)] and errors["flag"] == [1.0]
    assert result.row(one(result, "nan"))["reason"] == "both"
    assert result.row(one(result, "numbers"))["status"] == "nonfinite"


def test_steps_are_paired_as_those_of_dumps(tmp_path: Path) -> None:
    for step in (4, 5):
        put(tmp_path / "b", [line(0, step=step)], step)
        put(tmp_path / "t", [line(0, step=step + 3)], step + 3)
    apart = compared(tmp_path / "b", tmp_path / "t", tmp_path / "apart")
    assert apart.lack is not None and "no step in common" in str(apart.summary["notes"])
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out", map_steps={4: 7})
    assert result.lack is None and result.summary["steps"] == [4, 5] and differing(result) == {}


def test_what_is_printed_and_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(n) for n in range(8)]
    other = [dict(one) for one in lines]
    other[5] |= {"output": "the answer is 55", "score": 0.0}
    other[2]["score"] = 3.5
    put(tmp_path / "b", lines), put(tmp_path / "t", other)
    out = tmp_path / "out"
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Rollouts: 8 samples on both sides, 7 with the same response\n")
    assert re.search(
        r"the first that parts: Rollout\.\w{8}\.1\.response\.output, character 15", said
    )
    assert "'wer is 5'" in said and "'wer is 55'" in said
    assert "of equal responses, score differs in 1 sample" in said
    assert "3 compared, not judged: what was generated" in said
    assert main(["diagnose", str(out)]) == 4
    told = json.loads((out / "diagnosis.json").read_text())
    gate = {item["item"]: (item["state"], item["evidence"]) for item in told["gate"]}
    assert gate["tokens"][0] == "shut" and "1 of 8 responses differ" in gate["tokens"][1]
    assert gate["rewards"][0] == "shut" and "score differs in 1 sample" in gate["rewards"][1]
    assert main(["report", str(out)]) == 0 and (out / "report.html").stat().st_size > 1000


def test_equal_rollouts_agree(tmp_path: Path) -> None:
    put(tmp_path / "b", [line(0), line(1)]), put(tmp_path / "t", [line(1), line(0)])
    out = tmp_path / "out"
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(out), "-q"]) == 0
    assert main(["diagnose", str(out), "-q"]) == 0
    told = json.loads((out / "diagnosis.json").read_text())
    assert told["verdict"] == "aligned"
    gate = {item["item"]: item["state"] for item in told["gate"]}
    assert gate["tokens"] == "open" and gate["weights"] == "caveat"


# ------------------------------------------------------------------------ verl's pickles


@pytest.mark.parametrize(
    ("benchmark", "target", "advice"),
    [
        ([line(0, score=1)], [line(0, score=1.0)], "the same type of value"),
        ([line(0, acc=True)], [line(0, acc="True")], "the same type of value"),
        ([line(0), line(2)], [line(0)], "rollouts of the same prompts and steps"),
        ([line(0)], [line(0), line(1), line(1)], "rollouts of the same prompts and steps"),
        ([line(0)], [line(4)], "rollouts of the same prompts and steps"),
    ],
)
def test_what_to_do_is_about_rollouts(
    tmp_path: Path, benchmark: Sequence[Any], target: Sequence[Any], advice: str
) -> None:
    """Not about levels of a dump and names of modules."""
    lack = str(both(tmp_path, benchmark, target).lack)
    assert advice in lack and "dumped at the same level" not in lack
