"""``rlprobe official-table``: msprobe's own files, for every stage, from one process."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from rlprobe.cli import main
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor

pytestmark = [pytest.mark.msprobe, pytest.mark.slow]
pytest.importorskip("torch")
pytest.importorskip("msprobe")

ONE = {"Functional.linear.0.forward": call([tensor()], [tensor()])}
TWO = {"Functional.linear.0.forward": call([tensor()], [tensor((2.0, -1.0, 0.5, 3.0))])}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """Two stages, two steps, two ranks; the second stage cannot be compared by msprobe."""
    for side, data in (("b", ONE), ("t", TWO)):
        for step in (0, 1):
            for rank in (0, 1):
                place = tmp_path / side / "actor_update" / f"step{step}" / f"rank{rank}"
                dumps.write(place, data, stack=True)
        task = "statistics" if side == "b" else "tensor"
        place = tmp_path / side / "critic_update/step0/proc17"
        dumps.write(place, data, task=task)
    return tmp_path


def test_every_stage_gets_its_table(trees: Path) -> None:
    report = trees / "report.json"
    command = ["official-table", str(trees / "b"), str(trees / "t"), "-o", str(trees / "out")]
    assert main([*command, "--json", str(report)]) == 0
    table = rows(trees / "out/actor_update/official.csv")
    assert [row["NPU Name"] for row in table] == [
        "Functional.linear.0.forward.input.0",
        "Functional.linear.0.forward.output.0",
    ]
    assert table[1]["NormRelativeErr"] == "50.0%"
    assert (trees / "out/actor_update/official.xlsx").stat().st_size > 0
    other = sorted(p.name for p in (trees / "out/actor_update").glob("*.csv"))
    assert other == ["official-step0-rank1.csv", "official.csv"]
    written = {(r["stage"], r["rank"]): r["written"] for r in json.loads(report.read_text())}
    assert written == {
        ("actor_update", 0): True,
        ("actor_update", 1): True,
        ("critic_update", 0): False,
    }


def test_a_stage_msprobe_refuses_says_so_in_its_place(trees: Path) -> None:
    command = ["official-table", str(trees / "b"), str(trees / "t"), "-o", str(trees / "out")]
    assert main([*command, "--stage", "critic_update"]) == 4
    text = (trees / "out/critic_update/official.csv").read_text()
    assert "msprobe wrote no table" in text and "task" in text


def test_all_steps_on_request(trees: Path) -> None:
    command = ["official-table", str(trees / "b"), str(trees / "t"), "-o", str(trees / "out")]
    assert main([*command, "--stage", "actor_update", "--steps", "all"]) == 0
    assert (trees / "out/actor_update/official-step1-rank1.xlsx").is_file()


def test_without_msprobe_the_message_says_what_to_do(
    trees: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "msprobe.pytorch.compare.pt_compare", None)
    command = ["official-table", str(trees / "b"), str(trees / "t"), "-o", str(trees / "out")]
    assert main(command) == 1
    assert "install mindstudio-probe and torch" in capsys.readouterr().err


@pytest.mark.parametrize("trainer", ["hugging_face", "megatron"])
def test_msprobes_consistency_check_stands_beside_ours(tmp_path: Path, trainer: str) -> None:
    from tests.unit import train_infer_dumps as dumped

    whole = [[*prompt, *response] for prompt, response in dumped.SAMPLES]
    training = getattr(dumped, trainer)(dumped.Batch(whole, {}), 0)
    engine = dumped.engine(dumped.Batch([prompt for prompt, _ in dumped.SAMPLES], {}), 0)
    dumped.save(tmp_path / "actor_compute_log_prob/step0/rank0", training)
    dumped.save(tmp_path / "actor_generate_sequences/step0/rank0", engine)
    command = ["official-table", "--train-infer", str(tmp_path), "-o", f"{tmp_path}-out"]
    assert main(command) == 0
    table = rows(Path(f"{tmp_path}-out/train_infer/official.csv"))
    fused = [r for r in table if "qkv_proj" in r["Bench Name"] and r["NPU Name"] != "N/A"]
    assert fused
    if trainer == "hugging_face":
        assert all("q_proj" in row["NPU Name"] and "v_proj" in row["NPU Name"] for row in fused)
    assert Path(f"{tmp_path}-out/train_infer/official.xlsx").stat().st_size > 0
