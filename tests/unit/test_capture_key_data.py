"""Is key data written as the vendor's tools read it, ragged batches included?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from rlprobe.capture import key_data  # noqa: E402
from rlprobe.errors import UsageError  # noqa: E402
from tests.forked import Forked  # noqa: E402
from tests.unit.capture_helpers import UPDATE, make, recorder  # noqa: E402


def read(root: Path, name: str, micro_step: int = 0) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    folder = root / "data" / name / "step0/rank0" / f"micro_step{micro_step}"
    array = np.load(folder / f"{name}.npy", allow_pickle=False)
    return array, json.loads((folder / f"{name}.json").read_text())["data"]


def test_the_array_and_its_statistics(tmp_path: Path) -> None:
    value = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    key_data.write(tmp_path, "advantages", 0, 0, 0, value)
    array, statistics = read(tmp_path, "advantages")
    assert np.array_equal(array, value.numpy())
    assert statistics == {
        "max": 3.0,
        "min": -2.0,
        "mean": 0.625,
        "norm": pytest.approx(14.25**0.5),
        "shape": [2, 2],
        "dtype": "torch.float32",
    }


@pytest.mark.parametrize(
    ("value", "stored", "dtype"),
    [
        (torch.tensor([1.5, 2.5], dtype=torch.bfloat16), np.float32, "torch.bfloat16"),
        (torch.tensor([1.5, 2.5], dtype=torch.float16), np.float32, "torch.float16"),
        (torch.tensor([True, False]), np.int8, "torch.bool"),
        (torch.tensor([3, 250], dtype=torch.uint8), np.int64, "torch.uint8"),
        (torch.tensor([2**40, 1]), np.int64, "torch.int64"),
        (np.array([0.5, 1.0]), np.float64, "float64"),
    ],
)
def test_dtypes_that_can_be_subtracted(
    value: Tensor, stored: type[np.generic], dtype: str, tmp_path: Path
) -> None:
    key_data.write(tmp_path, "values", 0, 0, 0, value)
    array, statistics = read(tmp_path, "values")
    assert array.dtype == stored and statistics["dtype"] == dtype
    assert array.tolist() == [float(v) if array.dtype.kind == "f" else int(v) for v in value]


def rows() -> list[Tensor]:
    return [torch.arange(3.0), torch.arange(5.0) + 10, torch.arange(1.0) + 20]


def jagged() -> Tensor:
    return torch.nested.nested_tensor(rows(), layout=torch.jagged)


def jagged_with_holes() -> Tensor:
    padded = torch.nn.utils.rnn.pad_sequence(rows(), batch_first=True, padding_value=99.0)
    lengths = torch.tensor([3, 5, 1])
    return torch.nested.narrow(
        padded, dim=1, start=torch.tensor([0, 0, 0]), length=lengths, layout=torch.jagged
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["list", "jagged", "strided", "holes", "arrays"])
def test_ragged_batches_keep_their_rows_and_no_padding(kind: str, tmp_path: Path) -> None:
    value: Any = {
        "list": rows,
        "jagged": jagged,
        "strided": lambda: torch.nested.nested_tensor(rows()),
        "holes": jagged_with_holes,
        "arrays": lambda: [row.numpy() for row in rows()],
    }[kind]()
    key_data.write(tmp_path, "responses", 0, 0, 0, value)
    array, statistics = read(tmp_path, "responses")
    assert array.tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0, 14.0, 20.0]
    assert statistics["offsets"] == [0, 3, 8, 9]
    assert statistics["max"] == 20.0


def test_an_empty_array(tmp_path: Path) -> None:
    key_data.write(tmp_path, "responses", 0, 0, 0, torch.zeros(0, 4))
    array, statistics = read(tmp_path, "responses")
    assert array.shape == (0, 4) and statistics["max"] is None


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b", "-x", "x" * 200])
def test_names_that_could_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="key data name"):
        key_data.write(tmp_path, name, 0, 0, 0, torch.ones(1))
    assert not list(tmp_path.rglob("*.npy"))


@pytest.mark.parametrize("value", ["text", 3.0, np.array(["a"]), np.array([None]), [[1], "a"]])
def test_what_is_no_array_of_numbers_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="key data"):
        key_data.write(tmp_path, "values", 0, 0, 0, value)


def test_a_scope_writes_to_the_micro_step_it_is_in(tmp_path: Path) -> None:
    with recorder(tmp_path).stage(UPDATE, 0, 1, make()) as scope:
        for index in range(2):
            scope.micro_step(index)
            scope.key_data("old_log_probs", torch.full((2,), float(index)))
        scope.key_data("advantages", torch.ones(2), micro_step=5)
    assert read(tmp_path / "dump", "old_log_probs", 1)[0].tolist() == [1.0, 1.0]
    assert read(tmp_path / "dump", "advantages", 5)[0].tolist() == [1.0, 1.0]


def test_key_data_of_stages_whose_layers_are_not_dumped(tmp_path: Path) -> None:
    with recorder(tmp_path, stages=()).stage(UPDATE, 0, 1, make()) as scope:
        scope.key_data("prompts", torch.ones(2))
    with recorder(tmp_path, key_data=False).stage(UPDATE, 0, 1, make()) as scope:
        scope.key_data("responses", torch.ones(2))
    with recorder(tmp_path).stage(UPDATE, 30, 31, make()) as scope:
        scope.key_data("values", torch.ones(2))
    assert [path.name for path in (tmp_path / "dump/data").iterdir()] == ["prompts"]


COMPARE = """
import sys
from msprobe.core import SingleComparator
SingleComparator.compare(sys.argv[1], sys.argv[2], sys.argv[3], num_processes=1)
"""

SAVE = """
import sys, torch
from msprobe.core import SingleSave
SingleSave(sys.argv[1])
SingleSave.save({"old_log_probs": torch.tensor([[0.5, 1.0], [2.0, 4.0]])})
SingleSave.save({"old_log_probs": torch.tensor([[1.0, 1.0], [1.0, 1.0]])})
SingleSave.save({"attention_mask": torch.tensor([[True, False]])})
"""


@pytest.mark.msprobe
@pytest.mark.slow
def test_msprobes_comparator_reads_ours_and_its_own_alike(forked: Forked, tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    pytest.importorskip("msprobe")
    ours, theirs, out = tmp_path / "ours", tmp_path / "theirs", tmp_path / "out"
    micro = [[[0.5, 1.0], [2.0, 4.5]], [[1.0, 1.0], [1.0, 1.0]]]
    for index, values in enumerate(micro):
        key_data.write(ours, "old_log_probs", 0, 0, index, torch.tensor(values))
    key_data.write(ours, "attention_mask", 0, 0, 0, torch.tensor([[True, True]]))
    for code, arguments in ((SAVE, [theirs]), (COMPARE, [ours, theirs, out])):
        done = forked.run(code, *arguments)
        assert done.returncode == 0, done.stdout[-4000:]
    folder = "data/old_log_probs/step0/rank0/micro_step1"
    assert (ours / folder / "old_log_probs.npy").exists()
    assert (theirs / folder / "old_log_probs.npy").exists(), "msprobe's layout has changed"
    mine = json.loads((ours / folder / "old_log_probs.json").read_text())["data"]
    other = json.loads((theirs / folder / "old_log_probs.json").read_text())["data"]
    assert {key: mine[key] for key in other} == other
    table = openpyxl.load_workbook(out / "old_log_probs.xlsx").active
    found = {row[2]: row for row in table.iter_rows(min_row=2, values_only=True)}
    assert set(found) == {0, 1}
    assert found[0][8] == pytest.approx(0.5) and found[1][8] == 0.0
    mask = openpyxl.load_workbook(out / "attention_mask.xlsx").active
    assert [row[8] for row in mask.iter_rows(min_row=2, values_only=True)] == [1.0]
