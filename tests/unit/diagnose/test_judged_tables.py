"""Is everything recorded judged, excused or listed as not judged, and where do I see it?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.causes import MEANINGS
from rlprobe.cli import main
from rlprobe.diagnose import diagnosis
from rlprobe.errors import DumpError
from rlprobe.judge import analysis, execution, extent, reasons, tables
from rlprobe.judge.excuse import Excuse, reduce
from rlprobe.judge.inputs import Results
from rlprobe.judge.judge import judge
from rlprobe.refine import suspects
from tests.resealed import edited
from tests.unit.diagnose.conftest import Align, Alignment
from tests.unit.diagnose.planted import EPSILON
from tests.unit.diagnose.transformer import LAYERS, STAGES, Device

pytestmark = pytest.mark.slow

#: The first token of every prompt is padding, as its mask says.
PADDED: dict[str, Any] = {"padding": True}
PLAIN = Device(faults=PADDED)
PROBABILITIES: dict[str, Any] = {
    f"probabilities model.layers.{layer}.self_attn": lambda c: 0.5 * c for layer in range(LAYERS)
}


def recorded(alignment: Alignment) -> int:
    paths = [alignment.results / "compare/target" / s / "records.parquet" for s in STAGES]
    return sum(pl.read_parquet(path).height for path in paths)


def test_every_record_is_counted_once(align: Align) -> None:
    alignment = align(
        Device(split=True, faults=PROBABILITIES | PADDED), benchmark=Device(faults=PADDED)
    )
    found = alignment.diagnose()
    whole = extent.total(found.extent)
    assert whole.recorded == whole.judged + sum(whole.excused.values()) + sum(
        whole.unjudged.values()
    )
    key_data = pl.concat(
        [tables.read_table(Results.open(alignment.results), s) for s in STAGES]
    ).filter(pl.col("slot") == tables.KEY_DATA)
    metrics = found.extent[extent.TRAINER][0]
    assert metrics.judged == metrics.recorded > 0
    assert whole.recorded == recorded(alignment) + key_data.height + metrics.recorded > 700
    assert set(whole.excused) == {reasons.PADDING_ONLY}
    assert set(whole.unjudged) == {reasons.GIVEN}
    assert f"Judged: {whole.judged} of {whole.recorded} recorded" in found.sentence


def test_no_row_is_judged_and_unjudged(align: Align) -> None:
    alignment = align(
        Device(split=True, faults=PROBABILITIES | PADDED), benchmark=Device(faults=PADDED)
    )
    alignment.diagnose()
    for stage in STAGES:
        table = tables.read_table(Results.open(alignment.results), stage)
        because = pl.col("unjudged_because").is_not_null()
        assert table.filter(pl.col("judged") & because).is_empty()
        silent = ~pl.col("judged") & ~because & pl.col("excused_by").is_null()
        assert table.filter(silent).is_empty()
        assert table.filter(pl.col("beyond") & ~pl.col("judged")).is_empty()
        held = table.filter(pl.col("judged") & pl.col("error").is_not_null())
        assert held.get_column("floor").null_count() == 0


@pytest.mark.parametrize("faults", [{}, EPSILON.faults])
def test_who_reads_the_tables_sees_what_was_judged(align: Align, faults: dict[str, Any]) -> None:
    alignment = align(Device(split=True, faults=faults, stage=STAGES[1]))
    alignment.diagnose()
    results = Results.open(alignment.results)
    fresh, kept = judge(results, 0), tables.read(results)
    assert list(fresh.findings) == list(kept.findings)
    for name, one in fresh.findings.items():
        other = kept.findings[name]
        for what in ("records", "beyond", "unused", "rank"):
            assert getattr(one, what) == getattr(other, what), (name, what)
        assert [(o.name, o.excess) for o in one.outcomes] == [
            (o.name, o.excess) for o in other.outcomes
        ]
    parted = [analysis.first_of(step) for step in (fresh, kept)]
    assert (parted[0] is None) is (parted[1] is None) is (not faults)
    if parted[0] is not None and parted[1] is not None:
        origins = [found.origin for found in parted if found is not None]
        assert origins[0] is not None and origins[1] is not None
        for name in ("kind", "module", "operator", "reason"):
            assert getattr(origins[0], name) == getattr(origins[1], name)
        assert origins[0].row["excess"] == origins[1].row["excess"] > 1


def test_the_page_and_refining_say_what_the_diagnosis_says(align: Align) -> None:
    """What changes in a comparison afterwards changes neither: they read the judged tables."""
    alignment = align(Device(split=True, faults=EPSILON.faults, stage=STAGES[1]))
    assert main(["diagnose", str(alignment.results)]) == 0
    path = alignment.results / "compare/target" / STAGES[1] / "records.parquet"
    first = diagnosis.read(alignment.results / diagnosis.NAME).first
    before = suspects.find(alignment.results, 1)
    flip(path)
    assert first is not None and before.suspects is not None
    assert suspects.find(alignment.results, 1) == before
    assert first.module in before.suspects.modules


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def no_errors(path: Path) -> None:
    pl.read_parquet(path).with_columns(error=pl.lit(None, pl.Float64)).write_parquet(path)


@pytest.mark.parametrize("damage", [Path.unlink, flip, no_errors])
def test_tables_of_another_diagnosis_are_refused(
    align: Align, damage: Callable[[Path], None]
) -> None:
    alignment = align(Device(split=True))
    alignment.diagnose()
    damage(alignment.results / "judged" / f"{STAGES[1]}.parquet")
    with pytest.raises(DumpError, match=r"run `rlprobe diagnose RESULTS_DIR` again"):
        tables.read(Results.open(alignment.results))


def test_a_page_needs_the_tables_of_its_diagnosis(
    align: Align, capsys: pytest.CaptureFixture[str]
) -> None:
    alignment = align(Device(split=True))
    assert main(["diagnose", str(alignment.results)]) == 0
    with edited(alignment.results / "diagnosis.json") as said:
        said["judged"] = "0" * 64
    assert main(["report", str(alignment.results)]) == 1
    assert "made from another" in capsys.readouterr().err
    with pytest.raises(DumpError, match="belongs to another diagnosis"):
        tables.read(Results.open(alignment.results), "0" * 64)


def test_diagnose_says_how_many_rows_each_excuse_took(
    align: Align, capsys: pytest.CaptureFixture[str]
) -> None:
    alignment = align(
        Device(split=True, faults=PROBABILITIES | PADDED), benchmark=Device(faults=PADDED)
    )
    capsys.readouterr()
    assert main(["diagnose", str(alignment.results)]) == 0
    said = capsys.readouterr().err
    assert re.search(r"excused: 12 \(padding_only\): differs only at positions", said)
    assert "not judged: 5 (given): " in said


def test_an_older_diagnosis_is_still_read(align: Align) -> None:
    alignment = align(Device(split=True, faults=EPSILON.faults, stage=STAGES[1]))
    assert main(["diagnose", str(alignment.results)]) == 0
    path = alignment.results / "diagnosis.json"
    old = json.loads(path.read_text(encoding="utf-8")) | {"format": 1}
    for key in ("extent", "judged", "of", "digest"):
        del old[key]
    for key in ("known", "statement"):
        del old["cause"][key]
    old["cause"] |= {"class": "hyperparameter", "confidence": 0.7}
    path.write_text(json.dumps(old))
    found = diagnosis.read(path)
    assert found.cause is not None and found.cause.known == "consistent"
    assert found.cause.statement == MEANINGS["hyperparameter"]
    assert found.extent == {} and main(["verdict", str(path)]) == 3


def test_every_reason_is_defined_in_the_documentation(root: Path) -> None:
    text = (root / "docs/diagnosis.md").read_text(encoding="utf-8")
    for reason in (*reasons.EXCUSES, *reasons.UNJUDGED, *reasons.UNHELD):
        assert f"| `{reason}` |" in text, reason


def row(**given: Any) -> pl.DataFrame:
    values: dict[str, Any] = {
        "status": "matched", "reason": None, "floor": 1.0, "excess": 3.0, "judged": True,
        "beyond": True, "excused_by": None, "unjudged_because": None, **given,
    }  # fmt: skip
    kinds = {"excused_by": pl.String, "unjudged_because": pl.String, "reason": pl.String}
    return pl.DataFrame([values], schema_overrides=kinds)


def test_a_wider_floor_excuses_only_what_it_holds() -> None:
    within = reduce(row(), [Excuse(reasons.INHERITED, pl.lit(True), 4.0)])
    assert within.row(0, named=True) | {"beyond": False, "excused_by": "inherited"} == within.row(
        0, named=True
    )
    assert within.item(0, "excess") == 0.75 and within.item(0, "judged")
    beyond = reduce(row(), [Excuse(reasons.INHERITED, pl.lit(True), 2.0)])
    assert beyond.item(0, "beyond") and beyond.item(0, "excused_by") is None
    agrees = reduce(row(excess=0.5, beyond=False), [Excuse(reasons.INHERITED, pl.lit(True), 4.0)])
    assert agrees.item(0, "excused_by") is None, "it needed no excuse"


def test_nothing_excuses_what_is_not_finite_on_one_side() -> None:
    lopsided = row(status="nonfinite", reason="target", floor=None, excess=None)
    for reason, floor in ((reasons.NEAR_TIES, None), (reasons.INHERITED, 9.0)):
        left = reduce(lopsided, [Excuse(reason, pl.lit(True), floor)])
        assert left.item(0, "beyond") and left.item(0, "excused_by") is None


def test_the_first_excuse_is_the_one_that_is_named() -> None:
    both = [Excuse(reasons.RECOMPOSED, pl.lit(True)), Excuse(reasons.PADDING_ONLY, pl.lit(True))]
    left = reduce(row(), both)
    assert left.item(0, "excused_by") == "recomposed" and not left.item(0, "judged")


def test_an_excuse_without_a_defined_reason_is_an_error() -> None:
    with pytest.raises(ValueError, match="in no list"):
        reduce(row(), [Excuse("because", pl.lit(True))])


def test_phases_are_those_of_the_execution(align: Align) -> None:
    alignment = align(Device(split=True))
    alignment.diagnose()
    table = tables.read_table(Results.open(alignment.results), STAGES[2])
    changes = table.filter(pl.col("slot") == "change")
    assert changes.get_column("phase").unique().to_list() == [execution.CHANGES]
