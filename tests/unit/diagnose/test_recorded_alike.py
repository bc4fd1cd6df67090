"""Does what was recorded say the same of itself? Each kind, and what may well differ."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose.gate import shapes
from rlprobe.dumps.key_data import Row
from rlprobe.judge import keydata, reasons
from rlprobe.judge.reasons import AFTER_UPDATE
from tests.unit.diagnose.stand_ins import STATISTICS, found, rows, run


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
        "old_log_probs": keydata.Difference(
            "old_log_probs", 0, 0.0, 0.0, 0.0, 8, 0, 0, formats=formats
        )
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
    inherited = rows(slot="parameters", excess=4.0, judged=False, unjudged_because=AFTER_UPDATE)
    assert found(inherited) == "", "what the first update left is no other weight"
    lopsided = rows(slot="parameters", status="nonfinite", reason="target", excess=None)
    assert "parameters" in found(lopsided)


def norms(
    place: Path,
    value: Any,
    rank: int = 0,
    dtype: Any = np.float32,
    name: str = "actor_grad_norm",
    step: int = 0,
) -> Path:
    path = place / f"{name}/step{step}/rank{rank}/micro_step0/{name}.npy"
    path.parent.mkdir(parents=True)
    np.save(path, np.asarray(value, dtype))
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


@pytest.mark.parametrize(
    ("benchmark", "target", "said"),
    [
        ((2.0, 0.5), (2.0, 0.5), ""),
        ((2.0, 0.5), (2.0, 0.7), "group1 is 0.5 against 0.7"),
        ((2.0, 0.5), (float("nan"), 0.5), "group0 is 2 against nan"),
        ((2.0, 0.5), (2.0, 0.0), "group1 is 0.5 against 0"),
        ((2.0, 0.5), (2.06,), "on one side only"),
    ],
)
def test_every_parameter_group_has_its_norm(
    tmp_path: Path, benchmark: tuple[float, ...], target: tuple[float, ...], said: str
) -> None:
    """Megatron's optimizers have one that decays and one that does not, which may be empty."""
    text = found(None, run(norms(tmp_path / "b", benchmark)), run(norms(tmp_path / "t", target)))
    assert (said in text) if said else text == ""


def gradients(*norms: float, rank: int = 0) -> pl.DataFrame:
    return pl.concat(
        rows(slot="grad_reduced", norm_benchmark=norm, norm_target=norm, rank=rank, error=None,
             error_kind=None, floor=1e-4)
        for norm in norms
    )  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "recorded", "said"),
    [
        ((5.0, 0.0), (3.0, 4.0), ""),  # its parameters have no gradients
        ((3.0, 0.0), (3.0, 4.0), "group1 is 0 on both sides"),
        ((0.0, 4.0), (3.0, 4.0), "group0 is 0 on both sides"),
        ((0.0, 0.0), (3.0, 4.0), "group0 is 0 on both sides"),
        ((3.0, 0.0), (), "group1 is 0 on both sides"),  # nothing tells
    ],
)
def test_a_group_without_gradients_is_one_whose_gradients_are_not_there(
    tmp_path: Path, groups: tuple[float, ...], recorded: tuple[float, ...], said: str
) -> None:
    sides = [run(norms(tmp_path / side, groups)) for side in ("b", "t")]
    text = found(gradients(*recorded) if recorded else None, *sides)
    assert (said in text) if said else text == ""


def test_a_group_may_be_another_ranks(tmp_path: Path) -> None:
    """A rank has none of it where another has; and one alone that has none is said."""
    for side in ("b", "t"):
        for rank, groups in enumerate([(3.0, 4.0), (5.0, 0.0)]):
            norms(tmp_path / side, groups, rank)
    sides = [run(tmp_path / side, ranks=2) for side in ("b", "t")]
    assert found(pl.concat([gradients(3.0, 4.0), gradients(6.0, rank=1)]), *sides) == ""
    for side in ("b", "t"):
        norms(tmp_path / f"{side}0", (3.0, 0.0))
        norms(tmp_path / f"{side}0", (5.0, 0.0), 1)
    sides = [run(tmp_path / f"{side}0", ranks=2) for side in ("b", "t")]
    text = found(pl.concat([gradients(3.0, 4.0), gradients(5.0, rank=1)]), *sides)
    assert "rank0 micro_step0 group1 is 0 on both" in text and "rank1" not in text


def test_a_norm_of_another_format_is_said(tmp_path: Path) -> None:
    left, right = norms(tmp_path / "b", 2.0), norms(tmp_path / "t", 2.0, dtype=np.float64)
    assert "float32 against float64" in found(None, run(left), run(right))
    assert found(None, run(left), run(right), one_precision=False) == ""


@pytest.mark.parametrize(
    ("benchmark", "target", "said"),
    [
        ((3.0, np.float32), (7.0, np.float32), ""),  # what updates left
        ((3.0, np.float32), (np.nan, np.float32), "of step 1 is 3 against nan"),
        ((np.inf, np.float32), (3.0, np.float32), "of step 1 is inf against 3"),
        ((np.nan, np.float32), (np.nan, np.float32), ""),  # said where it begins
        ((3.0, np.float32), (3.0, np.float64), "of step 1 is float32 against float64"),
        ((3.0, np.float32), None, "of step 1 on one side only"),
    ],
)
def test_norms_of_steps_that_are_not_judged_have_one_form(
    tmp_path: Path, benchmark: Any, target: Any, said: str
) -> None:
    for side, own in (("b", benchmark), ("t", target)):
        norms(tmp_path / side, 2.0)
        norms(tmp_path / side, 2.0, name="actor_total_grad_norm", step=1)
        if own is not None:
            norms(tmp_path / side, own[0], dtype=own[1], step=1)
    sides = [run(tmp_path / side, steps=[0, 1]) for side in "bt"]
    text = found(None, *sides)
    assert (said in text) if said else text == ""
    joined = [run(tmp_path / side, steps=[0, 1], is_joined=True) for side in "bt"]
    assert found(None, *joined) == ""  # that step has a gate of its own


def test_norms_of_other_shards_are_not_compared(tmp_path: Path) -> None:
    left = run(norms(tmp_path / "b", 2.0))
    right = run(norms(tmp_path / "t", 3.0), ranks=2)
    assert found(None, left, right) == ""


@pytest.mark.parametrize(
    ("ranks", "said"), [((2.0, 2.0), ""), ((3.0, 3.0), "2 against 3"), ((1.0, 3.0), "")]
)
def test_the_norm_of_the_whole_gradient_is_compared_whatever_the_ranks(
    tmp_path: Path, ranks: tuple[float, float], said: str
) -> None:
    """What every rank has the same of does not depend on how many there are."""
    left = run(norms(tmp_path / "b", 2.0))
    for rank, value in enumerate(ranks):
        norms(tmp_path / "t", value, rank)
    text = found(None, left, run(tmp_path / "t", ranks=2))
    assert said in text and bool(text) == bool(said)


def whole(place: Path, parts: list[Any], total: list[float], **sizes: int) -> Any:
    """A run that reports a norm of all gradients on each rank, and the norms of its parts."""
    for rank, (part, norm) in enumerate(zip(parts, total, strict=True)):
        norms(place, part, rank)
        norms(place, norm, rank, name="actor_total_grad_norm")
    return run(place, ranks=len(parts), sizes=sizes)


@pytest.mark.parametrize(
    ("parts", "total", "sizes", "said"),
    [
        ([2.0], [2.0], {}, ""),
        ([2.0], [2.001], {}, ""),
        ([2.0], [1.4], {}, "actor_total_grad_norm micro_step0 is 1.4, that of all parts 2"),
        ([[3.0, 4.0]], [5.0], {}, ""),
        ([[3.0, 4.0]], [4.0], {}, "is 4, that of all parts 5"),
        # shards of data-parallel ranks, and whole gradients that all of them have
        ([3.0, 4.0], [5.0, 5.0], {}, ""),
        ([5.0, 5.0], [5.0, 5.0], {}, ""),
        ([3.0, 4.0, 3.0, 4.0], [5.0] * 4, {}, ""),
        ([3.0, 4.0], [3.0, 3.0], {}, "is 3, that of all parts"),
        ([3.0, 4.0], [3.0, 4.0], {}, "is 4, that of all parts"),
        # what one of two tensor-parallel ranks has was left out
        ([3.0, 4.0], [5.0, 5.0], {"tp": 2}, ""),
        ([3.0, 4.0], [3.0, 3.0], {"tp": 2}, "is 3, that of all parts 5"),
        ([5.0, 5.0], [5.0, 5.0], {"tp": 2}, "is 5, that of all parts 7.07107"),
        ([5.0, 5.0], [5.0, 5.0], {"pp": 2}, "is 5, that of all parts 7.07107"),
        # experts' ranks have parts of some gradients and copies of others
        ([3.0, 4.0], [4.5, 4.5], {"ep": 2}, ""),
        ([float("nan")], [1.0], {}, ""),
        # a layout that cannot be what ran
        ([2.0], [2.0], {"tp": 2}, ""),
        ([2.0], [1.4], {"tp": 2, "pp": 4}, "is 1.4, that of all parts 2"),
        ([3.0, 4.0], [3.0, 3.0], {"tp": 0}, "is 3, that of all parts"),
    ],
)
def test_a_norm_that_is_clipped_by_is_that_of_the_gradients(
    tmp_path: Path, parts: list[Any], total: list[float], sizes: dict[str, int], said: str
) -> None:
    """Both sides alike clip by a number that is none of theirs: nothing differs, and it is said."""
    sides = [whole(tmp_path / side, parts, total, **sizes) for side in ("b", "t")]
    text = found(None, *sides)
    contradicted = "clips by less or more" in text
    assert contradicted == bool(said) and said in text
    assert not contradicted or ("the benchmark clips" in text and "the target clips" in text)


def test_key_data_without_partners_are_said() -> None:
    difference = keydata.Difference("old_log_probs", 0, 0.0, 0.0, 0.0, 7, 1, 0)
    assert "1 row on the benchmark only" in found(key_data={"values": difference})


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
    assert item is not None and "1 record has another shape" in item.evidence
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


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("old_log_probs", [-3.0, -1.0, -2.0], ""),
        ("old_log_probs", [-3.0, 0.01, -2.0], ""),  # rounded to 16 bits on the way
        ("old_log_probs", [-3.0, 1.0, -2.0], "old_log_probs are not what they can be"),
        ("ref_log_prob", [3.0, 1.0, 2.0], "ref_log_prob are not"),
        ("update_log_probs (later updates)", [3.0, 1.0, 2.0], "(later updates) are not"),
        ("entropys", [3.0, 1.0, 2.0], ""),
        ("entropys", [3.0, -1.0, 2.0], "entropys are not"),
        ("values", [3.0, -1.0, 2.0], ""),
        ("given_old_log_probs", [3.0, 1.0, 2.0], ""),  # of whatever gave them
    ],
)
def test_logarithms_of_probabilities_are_not_above_zero(
    name: str, values: list[float], said: str
) -> None:
    row = [Row("s", np.array(values), 0, 0), Row("t", np.array([-4.0, -5.0, -6.0]), 0, 0)]
    if name == "entropys":
        row[1] = Row("t", np.array([4.0, 5.0, 6.0]), 0, 0)
    text = found(key_data={name: keydata.compare(row, row, name, 0)})
    assert said in text and bool(text) == bool(said)


def test_one_sample_of_one_number_is_said_and_a_short_one_is_not() -> None:
    def said(*samples: list[float]) -> str:
        row = [Row(f"s{n}", np.array(values), 0, 0) for n, values in enumerate(samples)]
        return found(key_data={"old_log_probs": keydata.compare(row, row, "old_log_probs", 0)})

    plain = [-1.0, -2.0, -3.0]
    assert said(plain, [-2.0, -2.0]) == ""
    assert "old_log_probs of 1 sample is one number throughout" in said(plain, [0.0] * 4)
    assert "first in sample s1" in said(plain, [0.0] * 4)


def test_metrics_of_one_side_and_those_that_are_zero_and_cannot_be_are_said() -> None:
    both = {"actor/kl_loss": 0.0, "actor/lr": 0.0, "actor/entropy": 4.0}
    assert found(left=run(metrics=both), right=run(metrics=both)) == ""
    zero = {"actor/grad_norm": 0.0, "actor/entropy": 0.0}
    said = found(left=run(metrics=both | zero), right=run(metrics=both | zero))
    assert "0 on both sides" in said and "actor/grad_norm" in said and "entropy" in said
    said = found(left=run(metrics=both), right=run(metrics={}))
    assert "metrics on one side only" in said and "timing" not in said
    assert found(left=run(metrics=both), right=run(metrics=both | {"timing_s/gen": 1.0})) == ""


def test_metrics_that_are_held_against_nothing_are_named() -> None:
    """Not finite on both sides, or made of what is not: they agree, and prove nothing."""
    values = {"actor/entropy": 1.0, "critic/values/mean": float("nan"), "actor/lr": 1e-3}
    assert found(None, run(metrics=values | {"critic/values/mean": 0.5}),
                 run(metrics=values | {"critic/values/mean": 0.5})) == ""  # fmt: skip
    text = found(None, run(metrics=values), run(metrics=values))
    assert (
        "metrics that are not finite on both sides and were not judged: critic/values/mean" in text
    )
    odd = keydata.Difference("entropys", 0, 0.0, 0.0, 0.0, 8, 0, 0, count=64, both_nonfinite=3)
    text = found(None, run(metrics={"actor/entropy": 1.0}), run(metrics={"actor/entropy": 1.0}),
                 key_data={"entropys": odd})  # fmt: skip
    assert "entropys are not finite on both sides at 3 of 64 values" in text
    assert "numbers that are not finite on both sides: actor/entropy (entropys)" in text
