"""Does what was recorded say the same of itself? Each kind, and what may well differ."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose.gate import recorded, shapes
from rlprobe.dumps.key_data import KeyData, Row
from rlprobe.judge import keydata, reasons

STATISTICS = ("max", "min", "mean", "norm")


def rows(**changes: Any) -> pl.DataFrame:
    """One record of two fp32 tensors that agree, and what a test changes of it."""
    row: dict[str, Any] = {
        "name": "Module.m.Linear.forward.0.output.0", "slot": "output", "status": "matched",
        "reason": None, "error": 0.0, "error_kind": "digest", "excess": 0.0, "floor": 1e-6,
        "direction": "forward", "unjudged_because": None,
    }  # fmt: skip
    for side in ("benchmark", "target"):
        row |= {f"dtype_{side}": "torch.float32", f"max_{side}": 2.0, f"min_{side}": -2.0,
                f"mean_{side}": 0.1, f"norm_{side}": 10.0}  # fmt: skip
    row |= changes
    for name in STATISTICS:
        b, t = row[f"{name}_benchmark"], row[f"{name}_target"]
        row.setdefault(f"{name}_diff", None if None in (b, t) else t - b)
    numbers = {name: pl.Float64 for name in row if name.startswith((*STATISTICS, "excess"))}
    return pl.DataFrame(
        [row], schema_overrides={"reason": pl.String, "unjudged_because": pl.String, **numbers}
    )


def run(data: Path | None = None, proof: Any = (), ranks: int = 1, weights: Any = (),
        stages: Any = None, metrics: Any = None) -> Any:  # fmt: skip
    layout = [SimpleNamespace(rank=rank, role="actor") for rank in range(ranks)]
    table = pl.DataFrame(list(weights), schema={"name": pl.String, "stage": pl.String,
                         "step": pl.Int32, "rank": pl.Int32}, orient="row")  # fmt: skip
    return SimpleNamespace(
        dump=data or Path("/nowhere"),
        key_data=lambda: data,
        recorded=None if data is None else KeyData(data, proof),
        mock_proof=lambda: list(proof),
        weights=lambda: table,
        metrics=lambda: [] if metrics is None else [{"step": 0, "metrics": metrics}],
        manifest=SimpleNamespace(
            layout=layout,
            stages={"actor_update": SimpleNamespace(state="captured"), **(stages or {})},
        ),
    )


def found(table: pl.DataFrame | None = None, left: Any = None, right: Any = None,
          one_precision: bool = True, key_data: Any = None) -> str:  # fmt: skip
    """What the item says; empty where it says nothing."""
    stage = SimpleNamespace(rows=rows() if table is None else table, laid_out=None, misplaced=None)
    evidence: Any = SimpleNamespace(
        results=SimpleNamespace(plan=SimpleNamespace(one_precision=one_precision)),
        step=SimpleNamespace(
            number=0,
            findings={"actor_update": SimpleNamespace(stage=stage)},
            key_data=key_data or {},
        ),
        benchmark=left or run(),
        target=right or run(),
    )
    item = recorded.check(evidence)
    return "" if item is None else item.evidence


def test_two_alike_say_nothing() -> None:
    assert found() == ""


@pytest.mark.parametrize("slot", ["input", "output", "grad"])
def test_another_format_under_one_precision_is_said(slot: str) -> None:
    table = rows(slot=slot, dtype_target="torch.bfloat16")
    assert "torch.float32 against torch.bfloat16" in found(table)
    assert found(table, one_precision=False) == "", "another precision was asked for"


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        (("float32", "float64"), "old_log_probs (float32 against float64)"),
        (("float32", "whole numbers"), "old_log_probs (float32 against whole numbers)"),
        (("whole numbers", "whole numbers"), ""),
    ],
)
def test_key_data_of_another_format_are_said(formats: tuple[str, str], said: str) -> None:
    kept = {
        "old_log_probs": SimpleNamespace(pairs=[], formats=formats, benchmark_only=0, target_only=0)
    }
    text = found(key_data=kept)
    assert said in text and bool(text) == bool(said)
    assert found(key_data=kept, one_precision=False) == "", "another precision has other formats"


def test_whole_numbers_of_another_width_are_no_format() -> None:
    assert found(rows(dtype_benchmark="torch.int64", dtype_target="torch.int32")) == ""


@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics_that_equal_digests_contradict(statistic: str) -> None:
    assert "other statistics" in found(rows(**{f"{statistic}_target": 3.0}))


def test_sums_that_two_devices_round_otherwise_are_no_contradiction() -> None:
    assert found(rows(norm_target=10.000002, mean_target=0.1000001)) == ""


@pytest.mark.parametrize(("norm", "said"), [(10.0625, False), (10.25, True)])
def test_statistics_are_rounded_to_the_format_of_their_tensor(norm: float, said: bool) -> None:
    """One step of bf16 at 10 is 1 / 16."""
    dtypes = {f"dtype_{side}": "torch.bfloat16" for side in ("benchmark", "target")}
    text = found(rows(error_kind="sketch", error=1e-4, norm_target=norm, **dtypes))
    assert ("other statistics" in text) == said


def test_a_sketch_that_saw_less_than_the_norms_is_contradicted() -> None:
    assert "other statistics" in found(rows(error_kind="sketch", error=1e-4, norm_target=10.1))
    assert found(rows(error_kind="sketch", error=1e-2, norm_target=10.1)) == ""
    # whole numbers have no norm; a sketch that saw nothing says that they are equal
    assert "other statistics" in found(
        rows(error_kind="sketch", error=2e-7, norm_target=None, norm_benchmark=None,
             norm_diff=None, max_target=9.0)
    )  # fmt: skip


def test_a_record_of_parameters_that_differs_is_said() -> None:
    assert "parameters" in found(rows(slot="parameters", excess=4.0))
    lopsided = rows(slot="parameters", status="nonfinite", reason="target", excess=None)
    assert "parameters" in found(lopsided)


def norms(place: Path, value: float, rank: int = 0, dtype: Any = np.float32) -> Path:
    path = place / f"actor_grad_norm/step0/rank{rank}/micro_step0/actor_grad_norm.npy"
    path.parent.mkdir(parents=True)
    np.save(path, dtype(value))
    return place


@pytest.mark.parametrize(
    ("benchmark", "target", "said"),
    [
        (2.0, 2.0, ""),
        (2.0, 2.0001, ""),
        (2.0, 2.2, "2 against 2.2"),
        (2.0, 0.0, "2 against 0"),
        (0.0, 0.0, "0 on both sides"),
        (2.0, float("nan"), "2 against nan"),
    ],
)
def test_gradient_norms_are_compared(
    tmp_path: Path, benchmark: float, target: float, said: str
) -> None:
    """0 = 0 is no agreement: gradients that were read have a norm."""
    sides = [run(norms(tmp_path / side, value)) for side, value in
             (("b", benchmark), ("t", target))]  # fmt: skip
    text = found(None, *sides)
    assert (said in text) if said else text == ""


def test_a_norm_of_another_format_is_said(tmp_path: Path) -> None:
    left, right = norms(tmp_path / "b", 2.0), norms(tmp_path / "t", 2.0, dtype=np.float64)
    assert "float32 against float64" in found(None, run(left), run(right))
    assert found(None, run(left), run(right), one_precision=False) == ""


def test_norms_of_other_shards_are_not_compared(tmp_path: Path) -> None:
    left = run(norms(tmp_path / "b", 2.0))
    right = run(norms(tmp_path / "t", 3.0), ranks=2)
    assert found(None, left, right) == ""


def test_key_data_without_partners_are_said() -> None:
    difference = SimpleNamespace(pairs=[], benchmark_only=1, target_only=0, formats=("a", "a"))
    assert "1 rows on the benchmark only" in found(key_data={"values": difference})


def test_a_proof_or_a_weight_of_one_side_alone_is_said() -> None:
    entry = {"stage": "actor_update", "step": 0, "rank": 0}
    assert "samples were digested" in found(
        None, run(proof=[entry, {**entry, "step": 1}]), run(proof=[{**entry, "step": 1}])
    )
    weight = ("w", "actor_update", 0, 0)
    assert "weights digested" in found(None, run(weights=[weight]), run(weights=[]))


def test_what_a_replay_does_not_run_is_not_missing() -> None:
    """The benchmark generated, digested its samples and weights then; the target replays."""
    captured = {"actor_generate_sequences": SimpleNamespace(state="captured")}
    replayed = {"actor_generate_sequences": SimpleNamespace(state="replayed")}
    entry = {"stage": "actor_generate_sequences", "step": 0, "rank": 0}
    both = {"stage": "actor_update", "step": 0, "rank": 0}
    weight = ("w", "actor_generate_sequences", 0, 0)
    left = run(proof=[entry, both], weights=[weight], stages=captured)
    assert found(None, left, run(proof=[both], stages=replayed)) == ""


def test_records_of_another_shape_and_without_numbers_are_said() -> None:
    other = rows(unjudged_because=reasons.OTHER_SHAPE)
    assert found(other) == "", "an item of its own, which hides nothing here"
    stage = SimpleNamespace(rows=other, laid_out=None, misplaced=None)
    step: Any = SimpleNamespace(findings={"actor_update": SimpleNamespace(stage=stage)})
    item = shapes.check(step)
    assert item is not None and "1 records have another shape" in item.evidence
    stage.rows = rows()
    assert shapes.check(step) is None
    stage.rows, stage.misplaced = other, "micro-batches hold other samples"
    assert shapes.check(step) is None
    lacking = rows(unjudged_because=reasons.NO_NUMBERS, norm_target=None, max_target=None,
                   min_target=None, mean_target=None, max_diff=None, min_diff=None,
                   mean_diff=None, norm_diff=None)  # fmt: skip
    assert "numbers on one side only" in found(lacking)
    nothing = {f"{name}_{side}": None for name in STATISTICS for side in ("benchmark", "target")}
    assert found(rows(unjudged_because=reasons.NO_NUMBERS, **nothing)) == "", "on neither side"


def test_a_stage_whose_every_output_is_zero_computes_nothing() -> None:
    zero = rows(norm_benchmark=0.0, norm_target=0.0, max_benchmark=0.0, max_target=0.0,
                min_benchmark=0.0, min_target=0.0, mean_benchmark=0.0, mean_target=0.0)  # fmt: skip
    assert "every output is 0 on both sides" in found(pl.concat([zero, zero]))
    assert found(pl.concat([zero, rows()])) == "", "an expert without tokens"


@pytest.mark.parametrize("value", [0.0, -1.5])
def test_results_that_are_one_number_throughout_prove_nothing(value: float) -> None:
    row = [Row("s", np.full(5, value), 0, 0)]
    same = {"entropys": keydata.compare(row, row, "entropys", 0)}
    assert "one number throughout: entropys" in found(key_data=same)
    given = {"advantages": keydata.compare(row, row, "advantages", 0)}
    assert found(key_data=given) == "", "no result: all rewards may be equal"
    other = [Row("s", np.arange(5.0), 0, 0)]
    assert found(key_data={"entropys": keydata.compare(other, other, "entropys", 0)}) == ""


def test_metrics_of_one_side_and_those_that_are_zero_and_cannot_be_are_said() -> None:
    both = {"actor/kl_loss": 0.0, "actor/lr": 0.0, "actor/entropy": 4.0}
    assert found(left=run(metrics=both), right=run(metrics=both)) == ""
    zero = {"actor/grad_norm": 0.0, "actor/entropy": 0.0}
    said = found(left=run(metrics=both | zero), right=run(metrics=both | zero))
    assert "0 on both sides" in said and "actor/grad_norm" in said and "entropy" in said
    said = found(left=run(metrics=both), right=run(metrics={}))
    assert "metrics on one side only" in said and "timing" not in said
    assert found(left=run(metrics=both), right=run(metrics=both | {"timing_s/gen": 1.0})) == ""
