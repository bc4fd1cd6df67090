"""Does a verdict need that enough was judged, and does it say what was not?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.diagnose.gate import judged
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.judge import reasons
from rlprobe.judge.analysis import Step
from rlprobe.judge.extent import Extent
from rlprobe.judge.inputs import Results
from tests.unit.diagnose.conftest import Align, Alignment
from tests.unit.diagnose.transformer import STAGES, Device


def evidence(alignment: Alignment, *extents: Extent) -> Evidence:
    found: dict[str, Any] = {f"stage{i}": {0: extent} for i, extent in enumerate(extents)}
    nothing: Any = None
    results = Results.open(alignment.results)
    return Evidence(results, nothing, nothing, {}, Step(0), found)


@pytest.mark.parametrize(
    ("extent", "state"),
    [
        (Extent(10, 10), None),
        (Extent(10, 9, {}, {reasons.NO_PARTNER: 1}), None),
        (Extent(10, 8, {}, {reasons.NO_PARTNER: 2}), "shut"),
        (Extent(10, 0, {}, {reasons.NO_NUMBERS: 10}), "shut"),
        (Extent(0, 0), "shut"),
        (Extent(10, 0, {reasons.RECOMPOSED: 10}), "shut"),
        (Extent(10, 5, {reasons.RECOMPOSED: 5}), None),
        (Extent(20, 10, {}, {reasons.LATER_STEP: 10}), None),
        (Extent(20, 10, {}, {reasons.AFTER_UPDATE: 10}), "caveat"),
    ],
)
def test_agreement_of_too_little_is_none(align: Align, extent: Extent, state: str | None) -> None:
    item = judged.check(evidence(align(Device(split=True), repeat=False), extent))
    assert (None if item is None else item.state) == state


def without_numbers(path: Path) -> None:
    """As a comparison of dumps whose statistics are null leaves it, and vouches for."""
    import json

    from rlprobe.dumps import results

    table = pl.read_parquet(path)
    nothing = [pl.lit(None, kind).alias(name) for name, kind in table.schema.items()
               if name in ("error", "error_kind", "error_uncertainty")]  # fmt: skip
    table.with_columns(nothing).write_parquet(path)
    summary = path.parent / results.SUMMARY
    said = json.loads(summary.read_text(encoding="utf-8"))
    said["tables"][path.name] = results.describe(path)
    summary.write_text(results.sealed(said))


def test_nulled_tables_are_no_agreement(align: Align) -> None:
    alignment = align(Device(split=True), repeat=False)
    for stage in STAGES:
        without_numbers(alignment.results / "compare/target" / stage / "records.parquet")
    found = alignment.diagnose()
    assert found.verdict == "not_comparable", found.sentence
    item = next(item for item in found.gate if item.item == "judged")
    assert item.state == "shut" and reasons.NO_NUMBERS in item.evidence
    assert found.extent[STAGES[0]][0].judged == 0
