"""Everything that makes msprobe say ``pass`` where nothing was compared, or where tensors differ.

That msprobe really does is shown in tests/msprobe/test_msprobe_traps.py, on the same dumps.
"""

from __future__ import annotations

import base64
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.sketch import sketch
from rlprobe.sketch_floors import UNSEEN
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import compared, compared_data

ONE = {"Functional.linear.0.forward": call([tensor()], [tensor()])}


def test_nothing_matches_is_not_comparable(tmp_path: Path) -> None:
    other = {"Functional.gelu.0.forward": call([tensor()], [tensor()])}
    result = compared_data(tmp_path, ONE, other)
    assert result.summary["compared"] == 0
    assert result.lack is not None and "nothing was compared" in str(result.lack)
    assert result.summary["counts"]["benchmark_only"] == 2
    assert result.summary["counts"]["target_only"] == 2


def test_nothing_matches_exits_4_and_still_writes_the_results(tmp_path: Path) -> None:
    other = {"Functional.gelu.0.forward": call([tensor()], [tensor()])}
    for name, data in (("b", ONE), ("t", other)):
        dumps.write(tmp_path / name, data)
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "out")]
    assert main(command) == 4
    assert (tmp_path / "out/unnamed/records.parquet").is_file()
    assert (tmp_path / "out/unnamed/summary.json").is_file()
    assert main([*command, "--no-fail"]) == 0


def test_records_of_the_benchmark_only_are_listed(tmp_path: Path) -> None:
    """An L0 target against a mix benchmark: msprobe drops what only the benchmark has."""
    more = {**ONE, "Module.model.norm.RMSNorm.forward.0": call([tensor()], [tensor()])}
    result = compared_data(tmp_path, more, ONE)
    assert result.summary["coverage"] == {"benchmark": 0.5, "target": 1.0}
    assert result.status("Module.model.norm.RMSNorm.forward.0.output.0") == "benchmark_only"
    assert "Module.model.norm.RMSNorm.forward.0.input.0" in result.summary["unmatched"]["benchmark"]
    assert result.lack is not None and "less than 90 %" in str(result.lack)


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "pickle"])
def test_a_tensor_that_cannot_be_read_is_unreadable(tmp_path: Path, damage: str) -> None:
    torch = pytest.importorskip("torch")
    from tests.msprobe import tensors

    x = torch.arange(64.0)
    for side in "bt":
        tensors.write(tmp_path / side, {"Functional.linear.0.forward": ([x], [x])})
    file = tmp_path / "t/dump_tensor_data/Functional.linear.0.forward.output.0.pt"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        torch.save({"not": "a tensor"}, file)
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    row = result.row("Functional.linear.0.forward.output.0")
    assert row["status"] == "unreadable"
    assert row["reason"].startswith("target: ")
    assert row["error"] is None and not row["identical"]
    assert result.summary["coverage"]["target"] == 0.5
    assert result.lack is not None


@pytest.mark.parametrize("lacks", ["b", "t", "bt"])
@pytest.mark.parametrize("left", ["nothing", "an empty directory"])
def test_without_tensor_files_what_statistics_say_stands(
    tmp_path: Path, lacks: str, left: str
) -> None:
    torch = pytest.importorskip("torch")
    from tests.msprobe import tensors

    x = torch.arange(64.0)
    for side, y in (("b", x), ("t", x * 1.5)):
        tensors.write(tmp_path / side, {"Functional.linear.0.forward": ([x], [y])})
    for side in lacks:
        shutil.rmtree(tmp_path / side / "dump_tensor_data")
        if left != "nothing":
            (tmp_path / side / "dump_tensor_data").mkdir()
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    row = result.row("Functional.linear.0.forward.output.0")
    assert (row["status"], row["error_kind"]) == ("matched", "statistics")
    assert row["error"] == pytest.approx(0.5, rel=1e-3)
    assert result.lack is None and result.summary["coverage"]["target"] == 1
    notes = "".join(result.summary["notes"])
    for side, name in (("b", "benchmark"), ("t", "target")):
        assert (f"tensor files of the {name}, which has no" in notes) == (side in lacks)
    assert "their elements were not compared" in notes


@pytest.mark.parametrize("shape", [(4,), (8,)])
def test_without_tensor_files_or_statistics_nothing_is_said_of_a_record(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    torch = pytest.importorskip("torch")
    name = "Functional.linear.0.forward.output.0.pt"
    for side, own in (("b", (4,)), ("t", shape)):
        made = tensor((None,) * 4, own, data_name=name)
        dumps.write(tmp_path / side, {"Functional.linear.0.forward": call([], [made])})
    (tmp_path / "b/dump_tensor_data").mkdir()
    torch.save(torch.ones(4), tmp_path / "b/dump_tensor_data" / name)
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    row = result.row(name.removesuffix(".pt"))
    # what shapes say needs no file
    assert row["status"] == ("unreadable" if shape == (4,) else "shape")
    assert result.lack is not None


def test_files_of_a_directory_that_may_not_be_listed_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from tests.msprobe import tensors

    for side, x in (("b", torch.arange(8.0)), ("t", torch.arange(8.0) * 2)):
        tensors.write(tmp_path / side, {"Functional.linear.0.forward": ([x], [x])})
    listing = os.scandir

    def refused(path: Any) -> Any:
        if Path(path).name == "dump_tensor_data":
            raise PermissionError(path)
        return listing(path)

    monkeypatch.setattr(os, "scandir", refused)
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    assert result.row("Functional.linear.0.forward.output.0")["error_kind"] == "tensor"


def test_tensors_that_one_side_alone_kept_are_counted(tmp_path: Path) -> None:
    data = [
        {"Functional.linear.0.forward": call([], [tensor((2.0, 0.0, 1.0, top)) | more])}
        for top, more in ((4.0, {"data_name": "x.pt"}), (5.0, {}))
    ]
    notes = "".join(compared_data(tmp_path, *data).summary["notes"])
    assert "the benchmark alone kept" in notes and "not compared: 1;" in notes
    assert "alone kept" not in "".join(
        compared_data(tmp_path / "2", *data[:1] * 2).summary["notes"]
    )


def test_a_difference_under_msprobes_rules_is_still_a_difference(tmp_path: Path) -> None:
    """One weight times three leaves 280 of 814 rows ``pass`` with errors above 1 %."""
    far = [tensor((3.0, -3.0, 0.75, 6.0))]
    near = [tensor((1.2, -1.2, 0.3, 2.4))]
    data = {"Functional.linear.0.forward": call([tensor()], [tensor()])}
    changed = {"Functional.linear.0.forward": call(far, near)}
    row = compared_data(tmp_path, data, changed).row("Functional.linear.0.forward.output.0")
    # max and min move by 0.2 in a norm of 2, the norm by 0.4, the mean by 0.05 * sqrt(16)
    # less what the norms' own rounding may be
    assert row["error"] == pytest.approx(0.2, rel=1e-5) and row["error"] < 0.2
    assert not row["identical"]


def test_values_saved_by_hand_are_compared_like_any_other(tmp_path: Path) -> None:
    """msprobe's output rules never reach ``save()`` rows."""
    for side, value in (("b", 2.0), ("t", 8.0)):
        leaf = tensor((value, -value, 0.0, 4 * value))
        dumps.write(tmp_path / side, {"logits.0.debug": leaf}, name="debug.json")
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row("logits.0.debug")
    assert row["error"] == pytest.approx(3.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_side_is_a_difference(tmp_path: Path, value: float) -> None:
    bad = {"Functional.linear.0.forward": call([tensor()], [tensor((value, -1.0, 0.0, 1.0))])}
    result = compared_data(tmp_path, ONE, bad)
    row = result.row("Functional.linear.0.forward.output.0")
    assert (row["status"], row["reason"]) == ("nonfinite", "target")
    assert not row["identical"]
    assert result.summary["nonfinite"]["target"]["name"] == row["name"]
    assert result.summary["nonfinite"]["benchmark"] is None


def test_the_first_nonfinite_record_is_named(tmp_path: Path) -> None:
    nan = tensor((math.nan, math.nan, math.nan, math.nan))
    good = {f"Functional.f.{n}.forward": call([tensor()], [tensor()]) for n in range(4)}
    bad = {
        f"Functional.f.{n}.forward": call(
            [nan if n > 2 else tensor()], [nan if n > 1 else tensor()]
        )
        for n in range(4)
    }
    result = compared_data(tmp_path, good, bad)
    assert result.summary["nonfinite"]["target"]["name"] == "Functional.f.2.forward.output.0"


def test_opposite_infinities_differ(tmp_path: Path) -> None:
    """msprobe sets both to zero and passes with error 0."""
    torch = pytest.importorskip("torch")
    from tests.msprobe import tensors

    x = torch.ones(8)
    for side, value in (("b", math.inf), ("t", -math.inf)):
        y = x.clone()
        y[3] = value
        tensors.write(tmp_path / side, {"Functional.linear.0.forward": ([x], [y])})
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row(
        "Functional.linear.0.forward.output.0"
    )
    assert row["status"] == "nonfinite"
    assert row["error"] is None and not row["identical"]


def test_a_finite_mask_whose_statistics_overflow_is_finite(tmp_path: Path) -> None:
    """Masks of -3.4e38 have mean -Infinity and norm Infinity in real dumps."""
    mask = tensor((0.0, -3.4028234663852886e38, -math.inf, math.inf))
    data = {"Functional.where.0.forward": call([tensor()], [mask])}
    row = compared_data(tmp_path, data, data).row("Functional.where.0.forward.output.0")
    assert row["status"] == "matched" and row["error"] == 0
    assert row["reason"] == "no difference seen" and not row["identical"]


def test_another_mask_value_is_seen_behind_an_infinite_norm(tmp_path: Path) -> None:
    low, lower = -1.7e38, -3.4e38
    data, changed = (
        {"Functional.where.0.forward": call([], [tensor((0.0, m, -math.inf, math.inf))])}
        for m in (low, lower)
    )
    row = compared_data(tmp_path, data, changed).row("Functional.where.0.forward.output.0")
    # all 16 elements of the benchmark may be as low as the lowest
    assert row["error"] == pytest.approx(1.0 / 4)


def test_proc_directories_are_compared_with_rank_directories(tmp_path: Path) -> None:
    """msprobe's first-difference search finds nothing in ``proc<pid>`` and exits 0."""
    changed = {"Functional.linear.0.forward": call([tensor()], [tensor((9.0, -1.0, 0.2, 9.0))])}
    dumps.write(tmp_path / "b/step0/rank0", ONE)
    dumps.write(tmp_path / "t/step0/proc4711", changed)
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    assert result.row("Functional.linear.0.forward.output.0")["error"] > 1
    assert result.summary["ranks"] == {"benchmark": [0], "target": [0]}


def test_an_empty_dump_is_not_comparable(tmp_path: Path) -> None:
    result = compared_data(tmp_path, {}, {})
    assert result.lack is not None


def test_a_directory_without_a_dump_is_not_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``rank: [0]`` without a process group dumps nothing, and msprobe exits 0."""
    dumps.write(tmp_path / "b/step0/rank0", ONE)
    (tmp_path / "t/step0").mkdir(parents=True)
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "out")]
    assert main(command) == 4
    assert "the target has no record at all" in capsys.readouterr().err


def test_checksums_of_freed_tensors_are_no_checksums(tmp_path: Path) -> None:
    """Under FSDP2 msprobe hashes tensors after they were freed: ``00000000`` on both sides."""
    data, changed = (
        {"Functional.linear.0.forward": call([], [tensor((top, -1.0, 0.25, 2.0), md5="00000000")])}
        for top in (1.0, 1.5)
    )
    row = compared_data(tmp_path, data, changed).row("Functional.linear.0.forward.output.0")
    assert row["error"] == pytest.approx(0.25) and row["error_kind"] == "statistics"


def test_a_racy_checksum_is_no_measure_of_a_difference(tmp_path: Path) -> None:
    data, changed = (
        {"Functional.linear.0.forward": call([], [tensor(md5=md5)])}
        for md5 in ("762beb0e", "762beb0f")
    )
    row = compared_data(tmp_path, data, changed).row("Functional.linear.0.forward.output.0")
    assert row["error"] is None and row["error_kind"] == "digest"
    assert not row["identical"] and "checksums differ" in row["reason"]


def test_xor_checksums_are_not_taken_for_content(tmp_path: Path) -> None:
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2]}
    data = {"Functional.linear.0.forward": call([], [{**leaf, "md5": "0xfe1511780746a372"}])}
    row = compared_data(tmp_path, data, data).row("Functional.linear.0.forward.output.0")
    assert row["error"] is None and not row["identical"] and "blind to order" in row["reason"]


def test_statistics_of_high_precision_dumps_lack_mean_and_norm(tmp_path: Path) -> None:
    data, changed = (
        {"Functional.linear.0.forward": call([], [tensor((top, -1.0, None, None))])}
        for top in (1.0, 1.5)
    )
    row = compared_data(tmp_path, data, changed).row("Functional.linear.0.forward.output.0")
    # all 16 elements may be as large as the largest
    assert row["error"] == pytest.approx(0.5 / 4)


def test_bare_nan_and_infinity_are_read(tmp_path: Path) -> None:
    data = {
        "Functional.linear.0.forward": call(
            [{"type": "str", "value": "NaN, Infinity"}],
            [tensor((math.nan, -math.inf, math.nan, math.inf))],
        )
    }
    result = compared_data(tmp_path, data, data)
    row = result.row("Functional.linear.0.forward.output.0")
    assert math.isnan(row["max_benchmark"]) and row["min_benchmark"] == -math.inf
    assert (row["status"], row["reason"]) == ("nonfinite", "both")
    assert result.row("Functional.linear.0.forward.input.0")["value_target"] == "NaN, Infinity"


def _rows(values: np.ndarray[Any, Any], **more: Any) -> dict[str, Any]:
    """A call whose output has the statistics of ``values``, and more keys."""
    x = values.astype(np.float64)
    numbers = (x.max(), x.min(), x.mean(), float(np.linalg.norm(np.sort(x, axis=None))))
    leaf = tensor(tuple(map(float, numbers)), values.shape, **more)  # type: ignore[arg-type]
    return {"Functional.linear.0.forward": call([], [leaf])}


@pytest.mark.parametrize("seen_by", ["sketch", "tensor", "digest"])
def test_permuted_rows_are_seen(tmp_path: Path, seen_by: str) -> None:
    """Max, min, mean and norm of a permuted tensor are the same; elementwise the error is 1.41."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 96)).astype(np.float32)
    permuted = x[rng.permutation(64)]
    assert not (permuted == x).all()
    name = "Functional.linear.0.forward.output.0"
    for side, values in (("b", x), ("t", permuted)):
        more: dict[str, Any] = {}
        if seen_by == "sketch":
            blob = base64.b64encode(sketch(values.reshape(-1)).astype("<f4").tobytes()).decode()
            more = {"Sketch": f"b64:{blob}"}
        elif seen_by == "digest":
            more = {"Digest": f"sha256:{side * 64}"}
        else:
            torch = pytest.importorskip("torch")
            more = {"data_name": f"{name}.pt"}
            (tmp_path / side / "dump_tensor_data").mkdir(parents=True)
            torch.save(torch.from_numpy(values), tmp_path / side / f"dump_tensor_data/{name}.pt")
        dumps.write(tmp_path / side, _rows(values, **more))
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row(name)
    assert row["max_diff"] == row["min_diff"] == row["norm_diff"] == 0
    assert not row["identical"]
    if seen_by == "tensor":
        assert row["error"] == pytest.approx(math.sqrt(2), rel=0.05)
    elif seen_by == "sketch":
        deviation = row["error_uncertainty"]
        assert row["error"] == pytest.approx(math.sqrt(2), rel=4 * deviation)
    else:
        assert row["error"] is None and "only tensors can tell" in row["reason"]


def test_a_sketch_that_sees_nothing_does_not_say_zero(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 4096, dtype=np.float32)
    blob = base64.b64encode(sketch(x).astype("<f4").tobytes()).decode()
    data = _rows(x, Sketch=f"b64:{blob}")
    row = compared_data(tmp_path, data, data).row("Functional.linear.0.forward.output.0")
    assert row["error"] == UNSEEN and row["error_uncertainty"] == 1.0
    assert row["reason"] == "no difference seen by the sketch"


def test_large_integers_differ_exactly(tmp_path: Path) -> None:
    """int64 values 4096 apart at 2**62 have a relative error of 0 with msprobe."""
    data, changed = (
        {
            "Functional.f.0.forward": call(
                [], [tensor((2**62 + n, 0, None, None), (2,), "torch.int64")]
            )
        }
        for n in (0, 1)
    )
    row = compared_data(tmp_path, data, changed).row("Functional.f.0.forward.output.0")
    assert row["max_diff"] == 1.0 and not row["identical"] and row["error"] > 0


def test_large_integer_tensors_differ_exactly(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.msprobe import tensors

    for side, n in (("b", 0), ("t", 1)):
        tensors.write(
            tmp_path / side, {"Functional.f.0.forward": ([], [torch.tensor([3, 2**62 + n])])}
        )
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row(
        "Functional.f.0.forward.output.0"
    )
    assert row["max_abs_err"] == 1.0 and row["ulp_max"] == 1.0 and not row["identical"]


def test_a_keyword_argument_has_one_name_in_both_tasks(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"data_name": "Functional.f.0.forward.kwargs.mask.pt"}
    plain, named = (
        {"Functional.f.0.forward": {**call([], []), "input_kwargs": {"mask": mask}}}
        for mask in (tensor(), tensor(**kept))
    )
    result = compared_data(tmp_path, plain, named)
    assert result.records.height == 1 and result.summary["counts"]["matched"] == 1
    assert result.records["rule"].to_list() == [None]


def test_a_moved_dump_finds_its_tensors(tmp_path: Path) -> None:
    """dump_data_dir inside dump.json is absolute and of another machine."""
    torch = pytest.importorskip("torch")
    from tests.msprobe import tensors

    for side, factor in (("b", 1.0), ("t", 2.0)):
        x = torch.arange(6.0) * factor
        tensors.write(tmp_path / "made" / side, {"Functional.f.0.forward": ([], [x])})
        shutil.move(tmp_path / "made" / side, tmp_path / side)
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row(
        "Functional.f.0.forward.output.0"
    )
    assert row["error_kind"] == "tensor" and row["error"] == pytest.approx(1.0)


def test_a_tensor_without_elements_needs_no_file(tmp_path: Path) -> None:
    data = {
        "Functional.f.0.forward": call(
            [tensor()],
            [tensor((None,) * 4, (0, 3), data_name="Functional.f.0.forward.output.0.pt")],
        )
    }
    result = compared_data(tmp_path, data, data)
    assert result.status("Functional.f.0.forward.output.0") == "matched"


def test_differing_rank_counts_are_compared_where_they_can_be(tmp_path: Path) -> None:
    """msprobe exits 1 with a traceback."""
    for rank in (0, 1):
        dumps.write(tmp_path / f"b/step0/rank{rank}", ONE)
    dumps.write(tmp_path / "t/step0/rank0", ONE)
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    counts = result.records.group_by("rank").agg(pl.col("status").unique()).sort("rank")
    assert counts["status"].to_list() == [["matched"], ["benchmark_only"]]
    assert any(
        "numbers of ranks: benchmark 2, target 1" in note for note in result.summary["notes"]
    )
    assert result.lack is not None


def test_every_record_appears_exactly_once(tmp_path: Path) -> None:
    benchmark, target = dumps.random_pair(3, 40)
    result = compared_data(tmp_path, benchmark, target, coverage=0.5)
    for side, data in (("benchmark", tmp_path / "b"), ("target", tmp_path / "t")):
        alone = compared(data, data, tmp_path / f"alone-{side}")
        names = result.records[f"name_{side}"].drop_nulls().to_list()
        assert sorted(names) == sorted(alone.records["name"].to_list())
        orders = result.records[f"order_{side}"].drop_nulls()
        assert orders.n_unique() == len(orders)
