"""``rlprobe official-table``: msprobe's own files, for every stage, and for key data."""

from __future__ import annotations

import contextlib
import csv
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl  # type: ignore[import-untyped]
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


def test_a_job_a_stage_ends_well_where_msprobe_refuses(trees: Path) -> None:
    """The workflow's way: one stage that msprobe refuses must not end the others' page."""
    command = ["official-table", str(trees / "b"), str(trees / "t"), "-o", str(trees / "out")]
    assert main([*command, "--stage", "critic_update", "--no-fail"]) == 0
    assert "msprobe wrote no table" in (trees / "out/critic_update/official.csv").read_text()


def graph(path: Path) -> dict[str, list[Any]]:
    """Tables of a graph view with the names, or the reason, in their rows."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'tb_nodes'").fetchall():
            return {"nodes": [n for (n,) in database.execute("SELECT node_name FROM tb_nodes")]}
        return {"why": [w for (w,) in database.execute("SELECT why FROM msprobe_wrote_no_graph")]}


def test_the_graph_view_stands_beside_the_table(trees: Path) -> None:
    module = {"Module.model.Linear.forward.0": call([tensor()], [tensor()])}
    for side in ("b", "t"):
        place = trees / side / "actor_update/step0/rank0"
        dumps.write(place, module, stack=True)
        built = {"Module.model.Linear.forward.0": None}
        (place / "construct.json").write_text(json.dumps(built))
    command = ["official-table", str(trees / "b"), str(trees / "t"), "-o", str(trees / "out")]
    assert main([*command, "--stage", "actor_update", "--graph"]) == 0
    found = graph(trees / "out/actor_update/official.vis.db")
    assert "Module.model.Linear.forward.0" in found["nodes"]
    # a process that recorded no structure says so in its place
    other = graph(trees / "out/actor_update/official-step0-rank1.vis.db")
    assert "'construct.json' is empty" in other["why"][0]
    (trees / "b/actor_update/step0/rank0/construct.json").unlink()
    assert main([*command, "--stage", "actor_update", "--graph"]) == 0
    found = graph(trees / "out/actor_update/official.vis.db")
    assert found["why"] == ["benchmark has no construct.json"]


@pytest.fixture
def keyed(tmp_path: Path) -> Path:
    """Key data of two steps on either side; one name is on one side only, one is of booleans."""
    for side, extra in (("b", "values"), ("t", "advantages")):
        for name in ("old_log_probs", "mask", extra):
            for step in (0, 1):
                for micro in (0, 1):
                    place = tmp_path / side / "data" / name / f"step{step}/rank0/micro_step{micro}"
                    place.mkdir(parents=True)
                    array = np.arange(6, dtype=np.float32) + (side == "t") * 0.5 * micro
                    np.save(place / f"{name}.npy", array > 2 if name == "mask" else array)
                    (place / f"{name}.json").write_text("{}")
    return tmp_path


def sheet(path: Path) -> list[tuple[Any, ...]]:
    return list(openpyxl.load_workbook(path).active.iter_rows(values_only=True))


@pytest.mark.parametrize(("steps", "found"), [("first", [0, 0]), ("all", [0, 0, 1, 1])])
def test_key_data_have_msprobes_own_tables(keyed: Path, steps: str, found: list[int]) -> None:
    out, said = keyed / "out", keyed / "said.json"
    command = ["official-key-data", str(keyed / "b"), str(keyed / "t"), "-o", str(out)]
    assert main([*command, "--steps", steps, "--json", str(said)]) == 0
    header, *rows_ = sheet(out / "official_key_data/old_log_probs.xlsx")
    table = [dict(zip(header, row, strict=True)) for row in rows_]
    assert [row["step"] for row in table] == found
    assert [row["micro_step"] for row in table] == [0, 1] * (len(found) // 2)
    assert [row["最大绝对误差"] for row in table] == [0, 0.5] * (len(found) // 2)
    told = {row["name"]: row for row in json.loads(said.read_text())}
    assert told["old_log_probs"]["written"] and told["old_log_probs"]["message"] is None
    assert not told["values"]["written"]
    assert sheet(out / "official_key_data/values.xlsx")[1] == ("values is on the benchmark only",)
    # what msprobe cannot subtract is left out by it, and said
    assert (
        "mask" in told["mask"]["message"] and len(sheet(out / "official_key_data/mask.xlsx")) == 1
    )


def test_sides_without_key_data_are_not_comparable(trees: Path) -> None:
    command = ["official-key-data", str(trees / "b"), str(trees / "t"), "-o", str(trees / "out")]
    assert main(command) == 4
    assert main([*command, "--no-fail"]) == 0


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
