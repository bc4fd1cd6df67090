"""Does a verdict need that enough was judged, and does it say what was not?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from rlprobe import stages
from rlprobe.diagnose.gate import judged
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.judge import execution, reasons
from rlprobe.judge.analysis import Step
from rlprobe.judge.excuses import positions
from rlprobe.judge.extent import Extent
from rlprobe.judge.inputs import Results
from rlprobe.judge.logical.joining import Joined
from rlprobe.judge.stage import Process, Stage
from rlprobe.said import Said, say
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


MODULES = [f"model.layers.{layer}.mlp" for layer in range(10)]


def of_wholes(
    rows: Sequence[tuple[int, str | None, str | None]],
    laid_out: Said | None = positions.SPLIT,
    alone: tuple[str, ...] = (),
    back_ends: tuple[str, str] = ("FSDPEngine", "FSDPEngine"),
    misplaced: Said | None = None,
    parts: bool = False,
    pipeline: int = 1,
) -> str | None:
    """State of the item for one stage: of rows' phase, module and why they were not judged."""
    table = pl.DataFrame(rows, schema={"phase": pl.Int32, "module": pl.String,
                                       "unjudged_because": pl.String}, orient="row")  # fmt: skip
    why = table.get_column("unjudged_because").drop_nulls().value_counts().rows()
    joined = None if laid_out is None else Joined(table, alone={"target": alone})
    stage: Any = Stage(stages.ACTOR_UPDATE, 0, [Process(0, table, [])], misplaced=misplaced,
                       laid_out=laid_out, logical=joined)  # fmt: skip
    one: Any = SimpleNamespace(stage=stage, origin=object() if parts else None)
    runs: Any = {
        role: SimpleNamespace(manifest=SimpleNamespace(layout=[process(back_end, pp)]))
        for role, back_end, pp in zip(
            ("benchmark", "target"), back_ends, (1, pipeline), strict=True
        )
    }
    nothing: Any = None
    results: Any = SimpleNamespace(
        run=runs.get, summary=lambda role, name: None, plan=SimpleNamespace(coverage=0.9)
    )
    extent = Extent(table.height, table["unjudged_because"].null_count(), {}, dict(why))
    found = Evidence(results, nothing, nothing, {}, Step(0, {stage.name: one}),
                     {stage.name: {0: extent}})  # fmt: skip
    item = judged.check(found)
    return None if item is None else item.state


def process(back_end: str, pipeline: int) -> Any:
    sizes = dict.fromkeys(("tp", "cp", "ep", "dp"), 1) | {"pp": pipeline}
    return SimpleNamespace(role="actor", rank=0, backend=back_end, chunks=None, **sizes)


FORWARD = [(execution.FORWARD, module, None) for module in MODULES]


def test_records_that_stand_for_a_stage_are_what_counts() -> None:
    """Losses of single micro-batches have no counterpart, however many micro-batches there are."""
    cut = [(execution.LOSS, None, reasons.OTHER_PLACES)] * 20
    cut += [(execution.LOSS, None, reasons.NO_PARTNER)] * 200
    assert of_wholes(FORWARD + cut) is None
    # where micro-batches hold the same samples, a loss without a partner was lost
    assert of_wholes(FORWARD + cut, say("models are divided otherwise")) == "shut"
    # but for a pipeline, whose last rank has them
    assert of_wholes(FORWARD + cut, say("models are divided otherwise"), pipeline=2) is None
    # and so was a gradient
    lost = [(execution.GRADIENTS, module, reasons.NO_PARTNER) for module in MODULES]
    assert of_wholes(FORWARD + cut + lost) == "shut"


@pytest.mark.parametrize(
    ("back_ends", "alone", "state"),
    [
        # the model has it: it was recorded on one side only
        (("FSDPEngine", "FSDPEngine"), "model.layers.{}.self_attn", "shut"),
        (("FSDPEngine", "FSDPEngine"), "lm_head.{}", "shut"),
        # what another back end calls otherwise
        (("FSDPEngine", "megatron"), "model.layers.{}.self_attn", None),
        # it has the same in another layer
        (("FSDPEngine", "megatron"), "model.layers.9{}.mlp", "shut"),
    ],
)
def test_modules_that_were_lost_on_a_side_are_lacking(
    back_ends: tuple[str, str], alone: str, state: str | None
) -> None:
    names = tuple(alone.format(number) for number in range(5))
    rows = FORWARD + [(execution.FORWARD, name, reasons.OTHER_MODULES) for name in names]
    assert of_wholes(rows, alone=names, back_ends=back_ends) == state


@pytest.mark.parametrize(("parts", "state"), [(False, "shut"), (True, "caveat")])
def test_where_nothing_stands_for_calls_they_are_lacking(parts: bool, state: str) -> None:
    """What parts in the little that was judged is a divergence all the same."""
    calls = [(execution.FORWARD, module, reasons.OTHER_PLACES) for module in MODULES]
    assert of_wholes(FORWARD + calls, None, misplaced=positions.SPLIT, parts=parts) == state
    assert of_wholes(FORWARD + calls[:1], None, misplaced=positions.SPLIT, parts=parts) is None
    # a stage without records at all is no matter of places
    lost = [(execution.FORWARD, module, reasons.NO_NUMBERS) for module in MODULES]
    assert of_wholes(FORWARD + lost, None, parts=parts) == "shut"


@pytest.mark.parametrize(("parts", "state"), [(False, "shut"), (True, "caveat")])
def test_wholes_of_other_tokens_behind_what_parts_hide_no_divergence(
    parts: bool, state: str
) -> None:
    """A router that was given other numbers sends other tokens to each expert."""
    others = [(execution.FORWARD, module, reasons.OTHER_SHAPE) for module in MODULES]
    assert of_wholes(FORWARD + others, parts=parts) == state


def test_updates_of_other_samples_are_lacking() -> None:
    """Several updates, shared out over other ranks: nothing of them is compared."""
    gradients = [(execution.GRADIENTS, module, reasons.OTHER_PLACES) for module in MODULES]
    assert of_wholes(FORWARD + gradients, positions.SPREAD) == "shut"


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
