"""Does a results directory hold one comparison, whole, and never parts of two?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.compare import outdir
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor

ONE = {"Functional.linear.0.forward": call([tensor()], [tensor()])}


def sides(tmp_path: Path, *stages: str) -> list[str]:
    for side in "bt":
        for stage in stages:
            dumps.write(tmp_path / side / stage / "step0/rank0", ONE)
    return ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "out")]


def found(tmp_path: Path) -> set[str]:
    return {p.parent.name for p in (tmp_path / "out").glob("*/summary.json")}


def test_a_stage_that_is_gone_goes(tmp_path: Path) -> None:
    command = sides(tmp_path, "actor_update", "critic_update")
    assert main([*command, "--table"]) == 0
    assert found(tmp_path) == {"actor_update", "critic_update"}
    (tmp_path / "out/critic_update/official.csv").write_text("msprobe's")
    for side in "bt":
        (tmp_path / side / "critic_update").rename(tmp_path / f"{side}-gone")
    assert main(command) == 0
    assert found(tmp_path) == {"actor_update"}
    # what others wrote there is theirs
    assert [p.name for p in (tmp_path / "out/critic_update").iterdir()] == ["official.csv"]


def test_one_stage_asked_for_leaves_the_others(tmp_path: Path) -> None:
    command = sides(tmp_path, "actor_update", "critic_update")
    assert main(command) == 0
    before = (tmp_path / "out/critic_update/summary.json").stat().st_mtime_ns
    assert main([*command, "--stage", "actor_update"]) == 0
    assert (tmp_path / "out/critic_update/summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["{", '{"data": 3}', None])
def test_a_failure_leaves_nothing_of_the_comparison_before(
    tmp_path: Path, damage: str | None
) -> None:
    """A damaged dump, one that is none, one that is missing: no earlier result is taken for new."""
    command = [*sides(tmp_path, "actor_update"), "--json", str(tmp_path / "r.json")]
    assert main(command) == 0
    assert json.loads((tmp_path / "r.json").read_text())["comparable"] is True
    (tmp_path / "out/diagnosis.json").write_text("of the earlier one")
    path = tmp_path / "t/actor_update/step0/rank0/dump.json"
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    assert main(command) == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["comparable"] is False and str(tmp_path / "t") in result["message"]
    if damage is not None:
        assert found(tmp_path) == set()
        assert not (tmp_path / "out/diagnosis.json").exists()


def test_a_mistake_in_the_command_leaves_no_earlier_answer(tmp_path: Path) -> None:
    command = [*sides(tmp_path, "actor_update"), "--json", str(tmp_path / "r.json")]
    assert main(command) == 0
    assert main(["compare", "nowhere", *command[2:]]) == 2
    assert json.loads((tmp_path / "r.json").read_text())["comparable"] is False


@pytest.mark.parametrize(
    ("holds", "wants", "free"),
    [
        ((["a", "b"], False), ["--stage", "a"], False),
        ((["a"], True), [], False),
        ((["b"], True), ["--stage", "a"], True),
        ((["a"], False), [], False),
    ],
)
def test_two_writers_never_meet(
    tmp_path: Path,
    holds: tuple[list[str], bool],
    wants: list[str],
    free: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = sides(tmp_path, "a", "b")
    with outdir.alone(tmp_path / "out", *holds):
        assert main([*command, *wants]) == (0 if free else 1)
    assert free or "is being written by another process" in capsys.readouterr().err
    assert main(command) == 0


def test_files_that_are_nobodys_results_stay(tmp_path: Path) -> None:
    """-o . in a directory of the user's own."""
    command = sides(tmp_path, "actor_update")
    own = tmp_path / "out" / "mine"
    own.mkdir(parents=True)
    (own / "table.csv").write_text("mine")
    (tmp_path / "out/report.html").write_text("mine")
    assert main(command) == 0
    assert (own / "table.csv").read_text() == (tmp_path / "out/report.html").read_text() == "mine"
