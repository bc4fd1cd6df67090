"""What a run recorded of one thing twice: formats, norms, statistics and sketches that differ."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.capture import key_data
from rlprobe.diagnose.gate import precise, recorded, settings
from rlprobe.dumps.key_data import KeyData
from rlprobe.dumps.results import Samples, Sketched
from rlprobe.judge import excuse, keydata, reasons
from tests.unit.diagnose.stand_ins import evidence, found, rows, run

torch = pytest.importorskip("torch")
SKETCHED = {"capture": {"sketch": True}}
WEIGHT = ("w", "actor_update", 0, 0, "actor", "torch.float32", "sha256:0", 4.0)


def weights(**changes: Any) -> Any:
    names = ("name", "stage", "step", "rank", "role", "dtype", "digest", "norm")
    return run(weights=[tuple((dict(zip(names, WEIGHT, strict=True)) | changes).values())])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"norm": 4.000001}, ""),
        ({"norm": 6.0}, "other norms than their digests allow, first w (actor_update)"),
        ({"norm": 6.0, "digest": "sha256:1"}, ""),
        ({"dtype": "torch.bfloat16"}, "torch.float32 against torch.bfloat16"),
        ({"dtype": "torch.bfloat16", "digest": "sha256:1"}, "kept in another format"),
    ],
)
def test_weights_that_contradict_themselves_are_said(changes: dict[str, Any], said: str) -> None:
    """Digests that differ are another item's, which shuts."""
    text = found(None, weights(), weights(**changes))
    assert said in text and bool(text) == bool(said)


def test_weights_may_be_kept_in_the_format_that_was_asked_for() -> None:
    right = weights(dtype="torch.bfloat16", digest="sha256:1")
    assert found(None, weights(), right, one_precision=False) == ""


WHOLE = {"error_kind": "statistics", "norm_benchmark": None, "norm_target": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"error_kind": "statistics"}, True),
        ({"error_kind": "digest"}, False),
        ({"error_kind": "sketch", "error": 1e-7}, False),
        # a mask that says never overflows its sketch; a scalar is its own value
        ({"error_kind": "statistics", "min_benchmark": -3e38, "min_target": -3e38}, False),
        ({"error_kind": "statistics", "shape_benchmark": []}, False),
        # nor has what is not finite one
        ({"error_kind": "statistics", "norm_target": float("nan")}, False),
        ({"error_kind": "statistics", "max_target": None}, False),
        ({"error_kind": "statistics", "dtype_benchmark": "torch.int64"}, False),
        # a mask of whole numbers has a sketch and no norm; a plain number has neither
        (WHOLE | {"dtype_benchmark": "torch.int32", "dtype_target": "torch.int32"}, True),
        (WHOLE | {"dtype_benchmark": "int", "dtype_target": "int"}, False),
        (WHOLE | {"dtype_benchmark": "torch.complex64", "dtype_target": "torch.complex64"}, False),
    ],
)
def test_records_without_their_sketches_are_said(changes: dict[str, Any], said: bool) -> None:
    table = rows(**changes)
    text = found(table, run(declared=SKETCHED), run(declared=SKETCHED))
    assert ("judged by statistics alone" in text) == said, text
    assert "statistics alone" not in found(table), "no sketch was asked for"


@pytest.mark.parametrize(
    ("error", "changes", "said"),
    [
        (1e-5, {}, False),
        (1e-2, {}, True),
        (1e-2, {"excused_by": reasons.INHERITED}, True),
        (1e-2, {"excused_by": reasons.NEAR_TIES}, False),
        (1e-2, {"beyond": True}, False),
        (1e-2, {"judged": False}, False),
        (1e-2, {"floor": 1e-2}, False),
    ],
)
def test_a_token_that_parts_in_a_record_that_agrees_is_said(
    error: float, changes: dict[str, Any], said: bool
) -> None:
    """One token of thousands is no part of a record's error, and has a sketch of its own."""
    judged = {"judged": True, "beyond": False, "excused_by": None, "rank": 0, "rank_target": None}
    table = rows(**(judged | changes)).with_columns(
        pl.col("excused_by").cast(pl.String), pl.col("rank_target").cast(pl.Int32),
        pl.col("rank").cast(pl.Int32),
    )  # fmt: skip
    name = table.item(0, "name")
    lines = [(0, 0, name, "s", n, 0, error if n == 5 else 1e-7) for n in range(9)]
    keys = ("step", "order", "name", "sample", "token", "rank_target", "error")
    tokens = pl.DataFrame(lines, schema=keys, orient="row").with_columns(
        occurrence=pl.lit(0, pl.UInt32), response_at=pl.lit(3, pl.Int32),
        rank_benchmark=pl.lit(0, pl.Int32), error_uncertainty=pl.lit(0.17),
        rank_target=pl.col("rank_target").cast(pl.Int32),
    )  # fmt: skip
    item = recorded.check(evidence(table, tokens=tokens.lazy()))
    assert (item is not None and "a token of theirs does not" in item.evidence) == said


CALLS = ("Module.l.0.B.forward.0.output.0", "Module.l.1.B.forward.0.output.0")


def sketched(*lines: tuple[str, int, float | None], sample: str = "s") -> pl.DataFrame:
    """Joined tokens of one sample: record, token and error."""
    table = [(0, 0, name, sample, token, 0, error) for name, token, error in lines]
    keys = ("step", "order", "name", "sample", "token", "rank_target", "error")
    kinds = {"error": pl.Float64, "rank_target": pl.Int32}
    return pl.DataFrame(table, schema=keys, schema_overrides=kinds, orient="row").with_columns(
        occurrence=pl.lit(0, pl.UInt32), response_at=pl.lit(3, pl.Int32),
        rank_benchmark=pl.lit(0, pl.Int32), error_uncertainty=pl.lit(0.17),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({}, None, True),
        ({}, 1e-7, False),
        # a record that is not finite says so itself
        ({"norm_target": float("nan")}, None, False),
        ({"beyond": True}, None, False),
    ],
)
def test_a_token_that_is_not_finite_in_a_record_that_is_is_said(
    changes: dict[str, Any], error: float | None, said: bool
) -> None:
    judged = {"judged": True, "beyond": False, "excused_by": None, "rank_target": None}
    table = rows(**(judged | changes)).with_columns(
        pl.col("excused_by").cast(pl.String), pl.col("rank_target", "rank").cast(pl.Int32)
    )
    tokens = sketched(*((table.item(0, "name"), n, error if n == 2 else 1e-7) for n in range(5)))
    item = recorded.check(evidence(table, tokens=tokens.lazy()))
    assert (item is not None and "tokens of theirs are not" in item.evidence) == said


def every(*calls: str, without: tuple[str, int] | None = None) -> list[tuple[str, int, float]]:
    return [(call, n, 1e-7) for call in calls for n in range(5) if (call, n) != without]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (sketched(*every(*CALLS)), ""),
        (sketched(*every(*CALLS, without=(CALLS[1], 0))), f"first of {CALLS[1]}"),
        (sketched(*every(*CALLS, without=(CALLS[0], 4))), f"first of {CALLS[0]}"),
        # what is run again for its gradients has its tokens twice, and a second sample fewer
        (sketched(*every(*CALLS), *every(CALLS[1].replace("forward.0", "forward.1"))), ""),
        (pl.concat([sketched(*every(*CALLS)),
                    sketched((CALLS[0], 0, 0.0), (CALLS[1], 0, 0.0), sample="t")]), ""),
        # a call in two passes of some tokens each
        (sketched(*every(CALLS[0]), *((CALLS[1].replace("forward.0", f"forward.{n // 3}"), n, 0.0)
                                      for n in range(5))), ""),
    ],
)  # fmt: skip
def test_tokens_that_one_side_lacks_are_said(tokens: pl.DataFrame, said: str) -> None:
    table = rows(judged=False, beyond=False, rank_target=None, excused_by=None).with_columns(
        pl.col("excused_by").cast(pl.String), pl.col("rank_target", "rank").cast(pl.Int32)
    )
    item = recorded.check(evidence(table, tokens=tokens.lazy()))
    text = "" if item is None else str(item.evidence)
    assert said in text and bool(said) == ("on one side only" in text)


@pytest.mark.parametrize(
    ("stage", "found", "misplaced", "said"),
    [
        ("actor_update", {"alone": {"0": 2}}, None, True),
        ("actor_update", {"alone": {"1": 2}}, None, False),
        ("actor_update", {"alone": {}}, None, False),
        ("actor_update", {"alone": {"0": 2}, "left_out": 1}, None, True),
        # a micro-batch that is padded otherwise is not joined, and lacks nothing
        ("actor_update", {"alone": {"0": 2}, "left_out": 1}, "spread", False),
        ("actor_update", {"alone": {"0": 2}}, "spread", True),
        ("forced_generation", {"alone": {"0": 2}}, None, False),
        ("actor_update", None, None, False),
    ],
)
def test_tokens_that_one_side_has_in_no_record_are_said(
    stage: str, found: dict[str, Any] | None, misplaced: str | None, said: bool
) -> None:
    table = rows(judged=False, beyond=False, rank_target=None, excused_by=None).with_columns(
        pl.col("excused_by").cast(pl.String), pl.col("rank_target", "rank").cast(pl.Int32)
    )
    samples = Samples(token_sketches=None if found is None else Sketched(**found))
    asked = evidence(table, stage=stage, tokens=sketched(*every(*CALLS)).lazy(),
                     summary=SimpleNamespace(samples=samples))  # fmt: skip
    asked.step.findings[stage].stage.misplaced = misplaced
    item = recorded.check(asked)
    assert ("2 tokens, in every record" in ("" if item is None else str(item.evidence))) == said


def saved(directory: Path, name: str, values: Any) -> KeyData:
    key_data.write(directory, name, 0, 0, 0, values)
    return KeyData(directory / "data")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_key_data_are_of_the_format_they_were_computed_in(tmp_path: Path, dtype: Any) -> None:
    """A file has no bfloat16: numbers are widened, and the format stands beside them."""
    values = torch.linspace(-2, 0, 12).reshape(2, 6)
    sides = [saved(tmp_path / f"{n}", "old_log_probs", values.to(form))
             for n, form in enumerate((torch.float32, dtype))]  # fmt: skip
    left, right = (side.rows("old_log_probs", 0) for side in sides)
    formats = keydata.compare(left, right, "old_log_probs", 0).formats
    assert formats == ("float32", str(dtype).removeprefix("torch."))
    left, right = (saved(tmp_path / f"whole{n}", "input_ids", values.to(form)).rows("input_ids", 0)
                   for n, form in enumerate((torch.int64, torch.int32)))  # fmt: skip
    assert len(set(keydata.compare(left, right, "input_ids", 0).formats)) == 1


@pytest.mark.parametrize("statistic", ["max", "min", "mean", "norm"])
def test_values_that_are_not_those_of_the_statistics_beside_them_are_said(
    tmp_path: Path, statistic: str
) -> None:
    values = torch.linspace(-2, 1, 12)
    kept = saved(tmp_path / "b", "values", values)
    assert kept.contradicted(0) == {}
    saved(tmp_path / "t", "values", values)
    path = next((tmp_path / "t").rglob("values.npy"))
    other = np.load(path)
    others = {"max": other * np.where(other > 0, 2, 1), "min": np.maximum(other, -1.0),
              "mean": other[::-1] + 0.1, "norm": np.where(abs(other) < 1.5, 0, other)}  # fmt: skip
    np.save(path, others[statistic])
    assert set(KeyData(tmp_path / "t" / "data").contradicted(0)) == {"values"}
    sides = [run(tmp_path / side / "data") for side in ("b", "t")]
    text = found(None, *sides)
    assert "key data of the target have other values" in text and "benchmark" not in text


def test_statistics_that_are_not_finite_are_of_values_that_are_not(tmp_path: Path) -> None:
    values = torch.tensor([0.5, float("nan"), float("-inf")])
    assert saved(tmp_path, "values", values).contradicted(0) == {}


def controlled(error: float, own: float | None, r: float | None) -> pl.DataFrame:
    """A record beyond its floor of 1e-3, its benchmark's error against the control, and R."""
    row = rows(error=error, excess=error / 1e-3, floor=1e-3)
    extra = {"R": r, "own_error": own}
    columns = [pl.lit(value, pl.Float64).alias(name) for name, value in extra.items()]
    return row.with_columns(*columns, before_update=pl.lit(True))


@pytest.mark.parametrize(
    ("error", "own", "r", "excused", "said"),
    [
        (1.5e-3, 0.9e-3, 1.2, True, False),  # the target is a little further than a floor
        (0.5, 0.4, 0.75, True, True),  # the benchmark itself is 400 floors from its control
        (0.5, 1e-4, 500.0, False, False),
        (0.5, None, None, False, False),
        (0.5e-3, 0.4, 0.0, False, False),
    ],
)
def test_what_the_high_precision_control_excuses_is_counted_and_said(
    error: float, own: float | None, r: float | None, excused: bool, said: bool
) -> None:
    """A control that is wrong would make every target no worse than the benchmark."""
    judged = excuse.begin(controlled(error, own, r))
    assert judged.item(0, "judged")
    assert (judged.item(0, "excused_by") == reasons.NO_WORSE) == excused
    assert judged.item(0, "beyond") == (error > 1e-3 and not excused)
    item = precise.check(evidence(judged).step)
    assert (item is not None and "400 times the floor" in item.evidence) == said


@pytest.mark.parametrize(
    ("declared", "slot", "dtypes", "said"),
    [
        ("fp32", "output", ("torch.bfloat16", "torch.bfloat16"), True),
        ("fp32", "output", ("torch.float16", "torch.bfloat16"), True),
        ("fp32", "output", ("torch.float32", "torch.float32"), False),
        ("fp32", "output", ("torch.float64", "torch.float64"), False),
        ("fp32", "input", ("torch.bfloat16", "torch.bfloat16"), False),
        ("bf16", "output", ("torch.bfloat16", "torch.bfloat16"), False),
    ],
)
def test_both_sides_in_a_coarser_format_than_was_asked_for(
    declared: str, slot: str, dtypes: tuple[str, str], said: bool
) -> None:
    """Their floors are those of the coarser format: two wrong sides would agree within them."""
    table = rows(slot=slot, dtype_benchmark=dtypes[0], dtype_target=dtypes[1])
    text = settings._coarser(evidence(table), declared)
    assert (text is not None) == said
    if text is not None:
        assert text == "1 outputs of actor_update are of a coarser format on both sides"
