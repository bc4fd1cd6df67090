"""Records that differ only at positions no result depends on: what is said of them, and counted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.judge import reasons
from rlprobe.judge.excuse import reduce
from rlprobe.judge.excuses import padding_only
from rlprobe.selftest.pipeline import Judged
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import LAYERS, ROWS, STAGES, Device

pytestmark = pytest.mark.slow

#: Attention's probabilities of every block, of the records alone: nothing computes with them.
#: The first token of every prompt is padding, as its mask says.
PADDED: dict[str, Any] = {"padding": True}
PLAIN = Device(faults=PADDED)
SHOWN: dict[str, Any] = {
    f"probabilities model.layers.{layer}.self_attn": lambda c: 0.5 * c for layer in range(LAYERS)
}
#: One record for each block and micro-batch of two rows in every stage.
HIDDEN = LAYERS * (ROWS // 2) * len(STAGES)


def caveats(gate: list[GateItem]) -> dict[str, GateItem]:
    return {item.item: item for item in gate if item.state == "caveat"}


def test_they_are_a_caveat_with_their_number_and_stages(align: Align) -> None:
    found = align(
        Device(split=True, faults=SHOWN | PADDED), benchmark=Device(faults=PADDED)
    ).diagnose()
    assert found.verdict == "aligned", found.sentence
    item = caveats(found.gate)["unused positions"]
    assert f"{HIDDEN} records of 3 stages differ by up to" in item.evidence
    assert all(f"{stage} ({HIDDEN // 3})" in item.evidence for stage in STAGES)
    assert "use one kernel on both sides" in item.action
    assert f"; {HIDDEN} more differ only at positions that no result depends on" in found.sentence
    assert "; one caveat. Judged: " in found.sentence


def test_without_them_nothing_is_said_of_them(align: Align) -> None:
    found = align(Device(split=True)).diagnose()
    assert not caveats(found.gate)
    assert "no result depends" not in found.sentence


def test_they_are_not_among_the_records_within_their_floor(align: Align) -> None:
    clean = align(Device(split=True)).diagnose()
    found = align(Device(split=True, faults=SHOWN | PADDED), benchmark=PLAIN, name="b").diagnose()
    counted = [sum(stage.records for stage in d.stages) for d in (clean, found)]
    assert counted[0] - counted[1] == HIDDEN
    assert f" {counted[1]:,} records of 3 stages lie within" in found.sentence


def test_a_stages_ratio_is_of_the_records_that_were_judged(align: Align) -> None:
    """The sentence, the file and the self-test's scoreboard give one number."""
    alignment = align(Device(split=True, faults=SHOWN | PADDED), benchmark=PLAIN)
    found = alignment.diagnose()
    ratio = Judged(found, alignment.results, 0.0).ratio
    said = re.search(r"the nearest at ([\d.e+-]+) of it", found.sentence)
    assert ratio == max(stage["largest_ratio"] for stage in found.noise["stages"].values()) < 1
    assert said is not None and said[1] == f"{ratio:.2g}"


def test_the_page_shows_them_as_any_caveat(align: Align) -> None:
    alignment = align(Device(split=True, faults=SHOWN | PADDED), benchmark=PLAIN)
    assert main(["diagnose", str(alignment.results)]) == 0
    assert main(["report", str(alignment.results)]) == 0
    page = (alignment.results / "report.html").read_text(encoding="utf-8")
    row = re.search(r"<tr><th scope=.row.><span lang=.en.>padding</span>.*?</tr>", page, re.DOTALL)
    assert row is not None
    assert '<span class="tag caveat">' in row[0]
    assert f"{HIDDEN} records of 3 stages" in row[0] and "To do</span>" in row[0]
    cells = re.findall(r"records judged, the nearest at [\d.]+ of its floor; others differ", page)
    captions = re.findall(rf"; {HIDDEN // 3} more beyond it only where", page)
    assert len(cells) == len(captions) == len(STAGES)


def stage(errors: dict[str, float | None]) -> pl.DataFrame:
    """A stage's rows, all of them beyond their floor."""
    return pl.DataFrame(
        {
            "name": list(errors),
            "status": [
                "matched" if error is not None else "nonfinite" for error in errors.values()
            ],
            "reason": [None if error is not None else "target" for error in errors.values()],
            "error": pl.Series(list(errors.values()), dtype=pl.Float64),
            "slot": "output",
            "judged": True,
            "beyond": True,
            "excused_by": pl.Series([None] * len(errors), dtype=pl.String),
            "unjudged_because": pl.Series([None] * len(errors), dtype=pl.String),
        }
    )


@pytest.mark.parametrize(
    ("errors", "follows"),
    [
        ({"probabilities": 0.5}, True),
        ({"probabilities": 0.05}, False),
        ({"probabilities": 0.5, "attn.output": 0.3}, False),  # a fault after the padding
        ({"probabilities": 0.5, "norm.output": None}, False),  # a NaN after it
    ],
)
def test_a_stage_without_results_follows_another_only_in_all_its_records(
    errors: dict[str, float | None], follows: bool
) -> None:
    mine = stage(errors)
    left = reduce(mine, padding_only.elsewhere(mine, [stage({"probabilities": 0.6})]))
    assert left.get_column("beyond").to_list() == [not follows] * len(errors)
    excused = [reasons.PADDING_ONLY if follows else None] * len(errors)
    assert left.get_column("excused_by").to_list() == excused


@pytest.mark.parametrize("benchmark", [{}, PADDED])
def test_without_padding_on_both_sides_nothing_is_excused(
    align: Align, benchmark: dict[str, Any]
) -> None:
    """In attention alone and reaching no result: that is a difference all the same."""
    found = align(Device(split=True, faults=SHOWN), benchmark=Device(faults=benchmark)).diagnose()
    assert found.verdict == "diverged", found.sentence
    assert found.first is not None and (found.first.module or "").endswith("self_attn")
    assert not any(extent.excused for steps in found.extent.values() for extent in steps.values())


def test_nothing_small_hides_behind_anothers_padding(align: Align) -> None:
    """One block's probabilities differ by half, as padding does, and another's by 1e-5 of them."""
    faults = PADDED | {
        "probabilities model.layers.0.self_attn": lambda c: 0.5 * c,
        "probabilities model.layers.1.self_attn": lambda c: c * np.float32(1 + 3e-5),
    }
    found = align(Device(split=True, faults=faults), benchmark=Device(faults=PADDED)).diagnose()
    assert found.verdict == "diverged", found.sentence
