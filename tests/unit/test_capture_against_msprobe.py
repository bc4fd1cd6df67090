"""Are the light engine's records msprobe's own, bit for bit where nothing flows backward?"""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("msprobe")

from tests.forked import Forked
from tests.installed import needs
from tests.unit.capture_helpers import rank_dir

pytestmark = [pytest.mark.msprobe, pytest.mark.slow, needs("transformers")]

#: Relative to the tensor's norm; msprobe's backward hooks change gradients by less than this.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def dumps(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("against")
    script = Path(__file__).with_name("capture_against_msprobe_run.py")
    done = forked.run(script, directory)
    assert done.returncode == 0, done.stdout[-4000:]
    return directory


def pair(dumps: Path, dtype: str, name: str = "dump.json") -> tuple[Any, Any]:
    """msprobe's file and ours."""
    step = 0 if dtype == "float32" else 1
    theirs = json.loads((dumps / f"msprobe/step{step}/rank0" / name).read_text())
    ours = json.loads((rank_dir(dumps / dtype) / name).read_text())
    return theirs, ours


def together(theirs: Any, ours: Any, path: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Every leaf or value of msprobe's, with ours at the same place."""
    if isinstance(theirs, dict) and "type" not in theirs:
        for key, value in theirs.items():
            yield from together(value, (ours or {}).get(key), f"{path}.{key}")
    elif isinstance(theirs, list):
        for index, value in enumerate(theirs):
            has = isinstance(ours, list) and index < len(ours)
            yield from together(value, ours[index] if has else "missing", f"{path}.{index}")
    else:
        yield path, theirs, ours


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_record_of_msprobes_is_there_with_the_same_numbers(dtype: str, dumps: Path) -> None:
    theirs, ours = pair(dumps, dtype)
    assert list(theirs["data"]) and set(theirs["data"]) <= set(ours["data"])
    assert ours["task"] == theirs["task"] and ours["level"] == theirs["level"]
    exact = near = 0
    for path, leaf, found in together(theirs["data"], ours["data"], ""):
        if not isinstance(leaf, dict) or "dtype" not in leaf:
            assert found == leaf, path
            continue
        flows_back = ".backward." in path or "parameters_grad" in path
        for key, value in leaf.items():
            other = found.get(key)
            if other == value or (isinstance(value, float) and math.isnan(value)):
                exact += 1
                continue
            assert flows_back, f"{path} {key}: {value} against {other}"
            assert abs(other - value) <= TOLERANCE[dtype] * abs(leaf["Norm"]), (path, key)
            near += 1
    assert exact > 500 and near < exact


def test_calls_have_msprobes_stacks(dumps: Path) -> None:
    theirs, ours = pair(dumps, "float32", "stack.json")

    def lines(document: dict[str, Any]) -> dict[str, list[str]]:
        return {name: stack for names, stack in document.values() for name in names}

    mine, other = lines(ours), lines(theirs)
    assert mine.keys() == other.keys()
    outside = "capture_against_msprobe_run.py"
    for name, stack in other.items():
        kept = [line for line in stack if outside not in line and "rlprobe" not in line]
        found = [line for line in mine[name] if outside not in line and "contextlib" not in line]
        assert found == kept, name


def test_forward_calls_have_msprobes_parents(dumps: Path) -> None:
    theirs, ours = pair(dumps, "float32", "construct.json")
    forward = {name: parent for name, parent in theirs.items() if ".forward." in name}
    assert forward and {name: ours[name] for name in forward} == forward


def test_msprobe_compare_reads_our_dump(dumps: Path, root: Path, tmp_path: Path) -> None:
    ours = rank_dir(dumps / "float32") / "dump.json"
    theirs = dumps / "msprobe/step0/rank0/dump.json"
    command = ["msprobe", "compare", "-tp", str(ours), "-gp", str(theirs), "-o", str(tmp_path)]
    executable = Path(sys.executable).with_name("msprobe")
    done = subprocess.run(
        [str(executable), *command[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    with next(tmp_path.glob("*.csv")).open(encoding="utf-8-sig", newline="") as table:
        rows = list(csv.DictReader(table))
    assert len(rows) > 300
    alone = {row["NPU Name"] for row in rows if row["Bench Name"] == "N/A"}
    # transformers passes hidden states to attention by keyword, and msprobe watches the gradients
    # of positional inputs only: those rows are ours alone, and nothing else is.
    assert alone == {
        f"Module.model.layers.{layer}.self_attn.Qwen2Attention.backward.{call}.output.0"
        for layer in (0, 1)
        for call in (0, 1)
    }
    # msprobe drops what only its benchmark has: see that nothing of its own is missing
    assert not any(row["NPU Name"] == "N/A" for row in rows)
    found = {row["Bench Name"] for row in rows}
    calls = json.loads(theirs.read_text())["data"]
    assert not [call for call in calls if not any(name.startswith(call) for name in found)]
