"""Does a results directory hold one comparison, whole, and never parts of two?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.compare import outdir
from rlprobe.store import read
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


#: What diagnose, report and refine leave beside a comparison.
ANSWERS = (
    "sides.json", "diagnosis.json", "report.html", "report.md", "report.json",
    "refine/diagnosis.json", "judged/actor_update.parquet",
    "history/20260101T000000Z-0123456789ab.html",
)  # fmt: skip


def answered(tmp_path: Path) -> list[str]:
    """A comparison that was judged; its command."""
    command = sides(tmp_path, "actor_update")
    assert main(command) == 0
    for name in ANSWERS:
        path = tmp_path / "out" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("of the earlier one")
    (tmp_path / "out/history/notes.html").write_text("mine")
    return command


def left(tmp_path: Path) -> list[str]:
    return [name for name in ANSWERS if (tmp_path / "out" / name).exists()]


@pytest.mark.parametrize(
    ("target", "more", "code"),
    [
        ("nope", [], 2),
        ("empty", [], 1),
        ("t", ["--rules", "nope.yaml"], 2),
        ("0123abcd", ["--store", "nope"], 2),
        ("nope", ["--stage", "actor_update"], 2),
    ],
)
def test_a_comparison_that_cannot_begin_leaves_no_answer_of_the_one_before(
    tmp_path: Path,
    target: str,
    more: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "b", target, "-o", "out", *more]) == code
    assert left(tmp_path) == [] and found(tmp_path) == set()
    assert main(["verdict", "out"]) == 1
    assert (tmp_path / "out/history/notes.html").read_text() == "mine"


def test_a_new_comparison_leaves_only_its_own(tmp_path: Path) -> None:
    assert main(answered(tmp_path)) == 0
    assert left(tmp_path) == ["sides.json"] and found(tmp_path) == {"actor_update"}


def test_a_failure_makes_no_directory_and_takes_nothing_of_anybodys(tmp_path: Path) -> None:
    command = sides(tmp_path, "actor_update")
    command[2] = str(tmp_path / "nope")
    assert main(command) == 2
    assert not (tmp_path / "out").exists()
    (tmp_path / "out/mine").mkdir(parents=True)
    (tmp_path / "out/report.md").write_text("mine")
    assert main(command) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine", "report.md"]


def test_a_failure_leaves_the_results_of_whoever_writes_there_now(tmp_path: Path) -> None:
    command = answered(tmp_path)
    with outdir.alone(tmp_path / "out", ["actor_update"], True):
        (tmp_path / "out/actor_update").mkdir(exist_ok=True)
        (tmp_path / "out/actor_update/summary.json").write_text("{}")
        assert main([*command[:2], str(tmp_path / "nope"), *command[3:]]) == 2
        assert found(tmp_path) == {"actor_update"}


@pytest.mark.parametrize(
    "out", ["b", "b/out", "t/actor_update/step0/rank0", "t/../b/x/y", ".", "link/x"]
)
def test_results_are_never_written_into_what_is_compared(
    tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides(tmp_path, "actor_update")
    (tmp_path / "link").symlink_to("t")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["compare", "b", "t", "-o", out]) == 2
    error = capsys.readouterr().err
    assert f"-o {out} " in error and "what is compared" in error and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_and_a_run_by_its_key_are_what_is_compared_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides(tmp_path, "actor_update")
    rank = tmp_path / "b/actor_update/step0/rank0"
    file = str(rank / "dump.json")
    assert main(["compare", file, str(tmp_path / "t"), "-o", str(rank)]) == 2
    assert main(["compare", "--train-infer", str(tmp_path / "b"), "-o", str(tmp_path / "b/x")]) == 2
    assert [path.name for path in rank.iterdir()] == ["dump.json"]
    assert not (tmp_path / "b/x").exists()
    key = "0123abcd" * 8
    run = tmp_path / "runs" / key
    run.parent.mkdir()
    (tmp_path / "b").rename(run)
    monkeypatch.setattr(read, "resolve", lambda store, prefix: key)
    assert (
        main(
            [
                "compare",
                "0123",
                str(tmp_path / "t"),
                "-o",
                str(run / "out"),
                "--store",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert not (run / "out").exists()


def test_results_beside_the_files_that_are_compared_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides(tmp_path, "actor_update")
    monkeypatch.chdir(tmp_path / "b/actor_update/step0/rank0")
    target = str(tmp_path / "t/actor_update/step0/rank0/dump.json")
    assert main(["compare", "dump.json", target, "-o", "out"]) == 0


def test_a_name_that_begins_alike_is_another_directory(tmp_path: Path) -> None:
    command = sides(tmp_path, "actor_update")
    assert main([*command[:-1], str(tmp_path / "b-results")]) == 0


@pytest.mark.parametrize("again", ["b", "b/../b", "link"])
def test_one_path_given_twice_is_noted(
    tmp_path: Path, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = sides(tmp_path, "actor_update")
    (tmp_path / "link").symlink_to("b")
    assert main([*command[:2], str(tmp_path / again), *command[3:]]) == 0
    assert "note: BENCHMARK and TARGET are the same" in capsys.readouterr().err
    assert main(command) == 0
    assert "are the same" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", " ", ".", "..", "../elsewhere", "a/b", "/tmp/x", ".locks"])
@pytest.mark.parametrize("command", ["compare", "official-table"])
def test_a_stage_that_is_no_name_of_a_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    words = sides(tmp_path, "actor_update")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main([command, *words[1:], f"--stage={name}"])
    assert ended.value.code == 2
    assert "is no name of a stage" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_results_cannot_stand_where_a_name_is_no_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in GBK; dumps may lie there, tables may not."""
    words = sides(tmp_path, "actor_update")
    odd = tmp_path / os.fsdecode(b"\xbb\xf9")
    (tmp_path / "b").rename(odd)
    words[1] = str(odd)
    assert main([*words[:-1], str(tmp_path / os.fsdecode(b"out\xd7"))]) == 2
    assert "-o is a path that is no UTF-8" in capsys.readouterr().err
    assert main(words) == 0
    out = words[-1]
    assert main(["diagnose", out]) == 0
    assert main(["report", out]) == 0
    assert "udcbb" in (Path(out) / "sides.json").read_text()
