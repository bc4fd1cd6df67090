"""Is what the screen says of two dumps true of what was compared?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlprobe.cli import main
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor
from tests.unit.batches import padded

NAME = "Functional.f.0.forward"
SURE = "dump with task tensor to be sure"


def compare(tmp_path: Path, *more: str) -> int:
    sides = [str(tmp_path / side) for side in "bt"]
    return main(["compare", *sides, "-o", str(tmp_path / "o"), *more])


def pair(tmp_path: Path, benchmark: Any, target: Any) -> None:
    for side, made in (("b", benchmark), ("t", target)):
        dumps.write(tmp_path / side / "step0/rank0", {NAME: call([], [made])})


def kept(directory: Path, array: Any) -> None:
    """One tensor, beside statistics that hold for it."""
    name = f"{NAME}.output.0.npy"
    with np.errstate(all="ignore"):
        norm = float(np.linalg.norm(array))
        values = (float(array.max()), float(array.min()), float(array.mean()), norm)
    made = tensor(values, array.shape, f"torch.{array.dtype}", data_name=name)
    path = dumps.write(directory / "step0/rank0", {NAME: call([], [made])}, task="tensor")
    (path.parent / "dump_tensor_data").mkdir()
    np.save(path.parent / "dump_tensor_data" / name, array)


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        (1.0, math.inf, "not finite on the target only"),
        (math.nan, 1.0, "not finite on the benchmark only"),
        (-math.inf, 1.0, "not finite on the benchmark only"),
        (math.inf, -math.inf, "not finite on both sides, and not the same"),
    ],
)
@pytest.mark.parametrize("tensors", [True, False])
def test_what_is_not_finite_is_said_to_be_no_matter_of_statistics(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    own: float,
    other: float,
    said: str,
    tensors: bool,
) -> None:
    for side, value in (("b", own), ("t", other)):
        array = np.ones((2, 8), np.float32)
        array[0, 0] = value
        if tensors:
            kept(tmp_path / side, array)
        else:
            made = tensor((float(array.max()), float(array.min()), value, value))
            dumps.write(tmp_path / side / "step0/rank0", {NAME: call([], [made])})
    assert compare(tmp_path) == 0
    out = capsys.readouterr().out
    assert said in out
    assert "statistics do not say by how much" not in out


@pytest.mark.parametrize("tensors", [True, False])
def test_tensors_are_advised_where_statistics_alone_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tensors: bool
) -> None:
    """Zeros of two signs are equal values and other bits: nothing is left to be sure of."""
    for side, sign in (("b", 1.0), ("t", -1.0)):
        if tensors:
            kept(tmp_path / side, np.float32(sign) * np.zeros((2, 8), np.float32))
        else:
            made = tensor((0.0 * sign, 0.0, 0.0, 0.0))
            dumps.write(tmp_path / side / "step0/rank0", {NAME: call([], [made])})
    assert compare(tmp_path) == 0
    out = capsys.readouterr().out
    assert (SURE in out) is not tensors
    assert "Nothing parts" in out


def test_a_checksum_that_alone_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair(tmp_path, tensor(md5="0000beef"), tensor(md5="0000cafe"))
    assert compare(tmp_path) == 0
    out = capsys.readouterr().out
    assert f"first: {NAME}.output.0 (checksums differ, statistics are equal" in out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda a: a.__setitem__((2, 0), math.nan), "3 samples joined, 3 identical, 1 not finite"),
        (lambda a: a.__setitem__((1, 0), math.inf), "3 samples joined, 3 identical, 1 not finite"),
        (lambda a: a.__setitem__((0, 0), 7.0), "4 samples joined, 3 identical, largest"),
        (lambda a: None, "4 samples joined, 4 identical, largest"),
    ],
)
def test_samples_of_which_no_difference_is_told_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: Any, said: str
) -> None:
    for side in "bt":
        padded(tmp_path / side / "data", (0, 0), [0, 1, 2, 3])
    path = tmp_path / "t/data/old_log_probs/step0/rank0/micro_step0/old_log_probs.npy"
    values = np.load(path)
    changed(values)
    np.save(path, values)
    assert compare(tmp_path) == 0
    assert f"old_log_probs: {said}" in capsys.readouterr().err


def test_samples_of_one_side_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    padded(tmp_path / "b/data", (0, 0), [0, 1, 2])
    padded(tmp_path / "t/data", (0, 0), [0, 1])
    assert compare(tmp_path) == 0
    said = "2 samples joined, 2 identical, 1 on the benchmark only, largest"
    assert f"old_log_probs: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("length", [4097, 20_000])
def test_a_name_beyond_all_bounds_is_shortened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    name = f"Functional.{'x' * length}.0.forward"
    for side in "bt":
        dumps.write(tmp_path / side / "step0/rank0", {name: call([], [tensor()])})
    assert compare(tmp_path) == 1
    said = capsys.readouterr().err
    assert f"its name has {len(name)} characters" in said
    assert "Functional.xxx" in said and "…" in said and "x" * 200 not in said


@pytest.mark.parametrize(
    ("name", "made", "said"),
    [
        (NAME, [[tensor(), [tensor((1.5, -1.0, 0.25, 2.0))]]], NAME),
        (NAME, [tensor((1.5, -1.0, 0.25, 2.0))], NAME),
        ("Module.a.Linear.forward.0", [{"key": tensor((1.5, -1.0, 0.25, 2.0))}],
         "Module.a.Linear.forward.0"),
        ("Module.output.Linear.forward.3", [tensor((1.5, -1.0, 0.25, 2.0))],
         "Module.output.Linear.forward.3"),
        # to be copied: whole, however long, and as JSON has it
        (f"Module.{'a_long_name.' * 12}Linear.forward.0", [tensor((1.5, -1.0, 0.25, 2.0))],
         f"Module.{'a_long_name.' * 12}Linear.forward.0"),
        ('Module.a"b.Linear.forward.0', [tensor((1.5, -1.0, 0.25, 2.0))],
         'Module.a\\"b.Linear.forward.0'),
        ("Module.é.Linear.forward.0", [tensor((1.5, -1.0, 0.25, 2.0))],
         "Module.é.Linear.forward.0"),
    ],
)  # fmt: skip
def test_the_list_that_is_advised_names_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, made: list[Any], said: str
) -> None:
    """However deep the first difference lies within what the call returned."""

    def even(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [even(one) for one in leaf]
        return tensor() if "dtype" in leaf else {key: even(one) for key, one in leaf.items()}

    for side, results in (("b", even(made)), ("t", made)):
        dumps.write(tmp_path / side / "step0/rank0", {name: call([], results)})
    assert compare(tmp_path) == 0
    assert f'list ["{said}"]' in capsys.readouterr().out


def test_a_name_that_is_too_long_to_be_copied_is_not_cut_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"Module.{'block.' * 50}Linear.forward.0"
    for side, top in (("b", 1.0), ("t", 1.5)):
        made = {name: call([], [tensor((top, -1.0, 0.25, 2.0))])}
        dumps.write(tmp_path / side / "step0/rank0", made)
    assert compare(tmp_path) == 0
    said = capsys.readouterr().out
    assert "list that call, by its whole name in records.parquet" in said
    assert 'list ["' not in said


@pytest.mark.parametrize("within", ["a\nBy status:", "\n", "x\n\ny"])
def test_a_name_of_several_lines_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], within: str
) -> None:
    name = f"Functional.{within}.0.forward"
    for side, top in (("b", 1.0), ("t", 2.0)):
        made = tensor((top, -1.0, 0.25, 2.0 * top))
        dumps.write(tmp_path / side / "step0/rank0", {name: call([], [made])})
    assert compare(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("By status:") for line in lines) == 1
    assert any(name.replace("\n", "\\n") in line for line in lines)


@pytest.mark.parametrize(
    ("own", "said"), [([0], "has step 0, the target 5"), ([0, 1], "has steps 0 to 1, the target 5")]
)
def test_one_step_is_no_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own: list[int], said: str
) -> None:
    for side, steps in (("b", own), ("t", [5, 6])):
        for step in steps:
            dumps.write(tmp_path / side / f"step{step}/rank0", {NAME: call([], [tensor()])})
    assert compare(tmp_path) == 4
    assert said in capsys.readouterr().err
