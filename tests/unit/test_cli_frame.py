"""The command line as a whole: what every command has in common."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlprobe import __version__, terminal
from rlprobe.cli import COMMANDS, common, main, parse


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"rlprobe {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"\n    {name}" in listed for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself_and_takes_the_common_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: rlprobe {command}" in text
    assert all(option in text for option in ("--json FILE", "--quiet", "--verbose"))


@pytest.mark.parametrize("words", [[], ["nonsense"], ["config"], ["config", "check"]])
def test_wrong_usage_exits_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "rlprobe" in capsys.readouterr().err


def test_a_mistake_is_one_message_on_stderr_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "check", "nowhere.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "rlprobe: error: nowhere.yaml: cannot be read: No such file or directory; "
        "give the path of a YAML file\n"
    )


def test_with_v_the_place_in_the_code_is_told_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "nowhere.yaml", "-v"]) == 2
    assert "read_yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["-q", "verdict", "F"], ["--json", "F", "verdict", "G"], ["verdict", "F", "-q"]]
)
def test_common_options_stand_before_or_after_the_command(words: list[str]) -> None:
    module, args = parse(words)
    assert module.__name__ == "rlprobe.cli.verdict"
    assert (args.quiet, args.json) == ((1, None) if "-q" in words else (0, Path("F")))


def test_a_directory_that_cannot_be_written_is_told_plainly(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    (tmp_path / "file").write_text("", encoding="utf-8")
    output = tmp_path / "file" / "out.json"
    assert main(["config", "check", "config/config.yaml", "--json", str(output)]) == 1
    assert f"rlprobe: error: {tmp_path / 'file'}: " in capsys.readouterr().err


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -m rlprobe config schema | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_options_may_not_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "check", "a.yaml", "--verb"])
    assert "unrecognized arguments: --verb" in capsys.readouterr().err


def test_check_lists_the_runs_with_their_keys(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    output = tmp_path / "check.json"
    assert main(["config", "check", "config/config.yaml", "--json", str(output)]) == 0
    described = json.loads(output.read_text(encoding="utf-8"))
    text = capsys.readouterr().out
    assert set(described["runs"]) == {"benchmark", "target", "repeat"}
    assert all(run["key"][:12] in text for run in described["runs"].values())


def test_a_new_plan_takes_the_place_of_an_older_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    text = (root / "config" / "config.yaml").read_text(encoding="utf-8")
    text = text.replace("results: results", f"results: {tmp_path}")
    config, marks = tmp_path / "a.yaml", []
    for coverage in (0.9, 0.8):
        config.write_text(f"{text}coverage: {coverage}\n", encoding="utf-8")
        assert main(["config", "plan", str(config)]) == 0
        found = sorted(path.name for path in (tmp_path / "cpu-default").iterdir())
        assert found[1:] == ["alignment.json"]
        marks.append(found[0])
    assert marks[0] != marks[1]
    plan = json.loads((tmp_path / "cpu-default" / "alignment.json").read_text(encoding="utf-8"))
    assert plan["coverage"] == 0.8


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    common.write_json(path, {"x": [1, None, "ü"]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"x": [1, None, "ü"]}
    with pytest.raises(ValueError, match="JSON compliant"):
        common.write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8"))["x"] == [1, None, "ü"]
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("command", ["compare", "config", "verdict"])
def test_commands_load_neither_torch_nor_a_framework(command: str) -> None:
    code = (
        "import sys; from rlprobe.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'msprobe', 'ray', 'verl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_the_frame_itself_loads_nothing_heavy() -> None:
    code = (
        "import sys; import rlprobe.cli\n"
        "print(sorted({'numpy', 'polars', 'pydantic', 'yaml', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_is_a_command_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["help"], "\n    compare"), (["help", "compare"], "rlprobe compare")):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        assert said in capsys.readouterr().out


def test_no_command_at_all_is_answered_with_the_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and all(f"\n    {name}" in printed.err for name in COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        ["rollouts", "show", ""],
        ["diagnose", " "],
        ["report", ""],
        ["store", "ls", "--store", ""],
        ["store", "gc", "--store="],
        ["--json", "", "config", "schema"],
        ["verdict", ""],
    ],
)
def test_an_empty_path_is_not_taken_for_the_directory_one_is_in(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script's variable leaves it that was never set."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "an empty path; was a shell variable not set?" in capsys.readouterr().err


def test_a_verdict_of_results_that_are_not_there_says_where_it_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verdict", str(tmp_path / "typo")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'typo'} does not exist (looked in {Path.cwd()})" in said


@pytest.mark.parametrize(
    "words", [["diagnose"], ["report"], ["report", "--format", "md"], ["reproduce", "-o", "x"]]
)
def test_results_that_are_not_there_are_said_to_be_missing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(tmp_path / "typo")]) == 2
    assert f"{tmp_path / 'typo'} does not exist; give the directory" in capsys.readouterr().err
    file = tmp_path / "diagnosis.json"
    file.write_text("{}")
    assert main([*words, str(file)]) == 2
    assert f"is a file; give the directory of the results, {tmp_path}\n" in capsys.readouterr().err


def test_rollouts_of_a_directory_are_told_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", "show", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"rlprobe: error: rollouts {tmp_path}: a directory; give a step{{N}}.h5 in it\n"
    )


@pytest.mark.parametrize("command", ["diagnose", "verdict"])
def test_help_speaks_of_comparisons_made_by_hand(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "`rlprobe compare -o`" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 records"), (1, "1 record"), (2, "2 records"), (2000, "2,000 records")],
)
def test_one_of_a_thing_is_not_several(count: int, said: str) -> None:
    assert terminal.counted(count, "record") == said


def test_an_overview_is_not_written_without_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing directory is a mistake; one that has no page yet is left out, and said to be."""
    good, later, out = tmp_path / "good", tmp_path / "later", tmp_path / "overview.html"
    good.mkdir()
    later.mkdir()
    (good / "report.html").write_text(
        '<meta name="rlprobe-runs" content="0-1"><meta name="rlprobe-name" content="good">'
    )
    given = ["report", "--index", str(good), str(tmp_path / "nope"), str(tmp_path / "no2")]
    assert main([*given, "-o", str(out)]) == 2
    assert f"no such directory: {tmp_path / 'nope'}, {tmp_path / 'no2'}" in capsys.readouterr().err
    assert not out.exists()
    assert main(["report", "--index", str(good), str(later), "-o", str(out)]) == 0
    assert f"{later} has no page and is left out" in capsys.readouterr().err
    assert 'href="good/report.html"' in out.read_text(encoding="utf-8")


def test_everything_that_is_not_there_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(
        "name: a\nframework: verl\nframework_version: '0.9.1'\n"
        "model: {path: /no/model, critic_path: 'builtin:nothing'}\n"
        "data: {train_files: /no/train.parquet}\n"
        "benchmark: {device: cpu, precision: fp32, lock: no/lock.txt}\n"
        "target: {device: cpu, precision: fp32, fault: 'no/fault.py:x'}\n",
        encoding="utf-8",
    )
    assert main(["config", "check", "a.yaml"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("5 problems")
    keys = [line.split(":")[0].strip() for line in said[1:]]
    assert keys == ["model.path", "model.critic_path", "data.train_files", "target.fault",
                    "benchmark.lock"]  # fmt: skip


def test_an_override_that_a_run_does_not_take_is_said(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    text = (root / "config/config.yaml").read_text(encoding="utf-8")
    config = tmp_path / "a.yaml"
    config.write_text(
        text.replace("overrides:\n", "overrides:\n  - trainer.n_gpus_per_node=8\n", 1), "utf-8"
    )
    assert main(["config", "check", str(config)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert said == ["note: overrides: trainer.n_gpus_per_node=8 is overruled: rlprobe sets it to 1"]
    assert main(["config", "check", "config/config.yaml"]) == 0
    assert "overruled" not in capsys.readouterr().out


@pytest.mark.parametrize("key", ["image", "torch_image"])
def test_an_image_of_comparisons_that_is_not_here_is_said_and_stops_no_training(
    key: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The site that collects has no use for the image in which another one compares."""
    monkeypatch.chdir(root)
    text = (root / "config/config.yaml").read_text(encoding="utf-8")
    config, image = tmp_path / "a.yaml", tmp_path / "compare.sif"
    config.write_text(f"{text}\nanalysis: {{{key}: {image}}}\n", "utf-8")
    assert main(["config", "check", str(config)]) == 0
    said = f"note: analysis.{key}: {image} does not exist"
    assert said in capsys.readouterr().out
    image.touch()
    assert main(["config", "check", str(config)]) == 0
    assert "note: analysis" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_a_directory_without_results_says_how_there_come_to_be_some(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "holds no results" in said and "make align" in said and said.count("\n") == 1
