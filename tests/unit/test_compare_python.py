"""Is a comparison from Python the command's, and does the example of the docs run?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rlprobe
from rlprobe.cli import main
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor


def leaf(top: float) -> dict[str, Any]:
    return tensor((top, -top, 0.1 * top, 2 * top), (4, 8))


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """gpu/dump and npu/dump: a layer of the second stage is 1 % off."""
    for side, wrong in (("gpu", 1.0), ("npu", 1.01)):
        for stage in ("actor_compute_log_prob", "actor_update"):
            off = wrong if stage == "actor_update" else 1.0
            data = {
                f"Module.layers.{n}.Linear.forward.0": call([leaf(5.0 + n)], [leaf(6.0 + n * off)])
                for n in range(3)
            }
            dumps.write(tmp_path / side / "dump" / stage / "step0/rank0", data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_of_the_docs_runs(
    trees: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (root / "docs/compare.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(example, {})
    out = capsys.readouterr().out
    assert out.startswith("Module.layers.1.Linear.forward.0.output.0")
    assert "matched" in out and "excess" in out
    assert not (trees / "sides.json").exists()


def test_it_is_what_the_command_finds(trees: Path) -> None:
    found = rlprobe.compare_dumps("gpu/dump", trees / "npu/dump", out="kept")
    assert found.first is not None and found.first["stage"] == "actor_update"
    assert found.lack is None
    assert found.judged.filter("beyond")["name"].to_list() == [
        "Module.layers.1.Linear.forward.0.output.0", "Module.layers.2.Linear.forward.0.output.0"
    ]  # fmt: skip
    assert set(found.summaries) == {"actor_compute_log_prob", "actor_update"}
    assert found.records.height == 12 and found.key_data.is_empty()
    assert main(["diagnose", "kept"]) == 0
    diagnosis = rlprobe.read_diagnosis(Path("kept/diagnosis.json"))
    assert diagnosis.first is not None
    assert diagnosis.first.benchmark["record"] == found.first["name"]


def test_errors_are_the_packages_own(trees: Path) -> None:
    with pytest.raises(rlprobe.RlprobeError, match="no such file"):
        rlprobe.compare_dumps("nowhere", "npu/dump")
    with pytest.raises(rlprobe.RlprobeError, match="neither side"):
        rlprobe.compare_dumps("gpu/dump", "npu/dump", stages=["nothing"])
