"""The benchmark was imported: what its own site is asked for, and what is said here meanwhile."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.diagnosis import Cause, Diagnosis
from rlprobe.errors import UsageError
from rlprobe.judge.inputs import Plan as Alignment
from rlprobe.judge.inputs import Results
from rlprobe.refine import suspects
from rlprobe.refine.decide import awaited
from rlprobe.report.commands import _waits
from rlprobe.spec import Suspects

WANTED = Suspects("actor_update", 0, 0, ("model.norm",), (0,), "Module.model.norm.output.0",
                  trace="module", trace_module="model.norm")  # fmt: skip


def shared(directory: Path) -> suspects.Plan:
    plan = suspects.Plan(WANTED, "b" * 64, "c" * 64)
    return suspects.shared(plan, directory / "my file.yaml", directory, directory / "store")


def test_the_command_for_the_other_site_has_in_it_what_to_look_at(tmp_path: Path) -> None:
    words = shlex.split(shared(tmp_path).elsewhere)
    assert words[:4] == ["rlprobe", "refine", "--config", "CONFIG"]
    found = suspects.half(words[words.index("--suspects") + 1])
    assert (found.benchmark, found.suspects) == ("b" * 64, WANTED)
    nothing = suspects.Plan(None, "b", "c", "the verdict is aligned")
    assert suspects.shared(nothing, tmp_path, tmp_path, tmp_path) == nothing


def test_commands_for_here_survive_a_shell(tmp_path: Path) -> None:
    words = shlex.split(shared(tmp_path).afterwards)
    assert str((tmp_path / "my file.yaml").resolve()) in words
    assert words[-3:] == ["rlprobe", "report", str(tmp_path.resolve())]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "no JSON", "[" * 10_000, '{"benchmark": "b"}',
     '{"benchmark": "b", "suspects": 3}', '{"benchmark": "b", "suspects": null}'],
)  # fmt: skip
def test_what_is_no_such_text_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="copy the whole command"):
        suspects.half(text)


@pytest.mark.parametrize(("name", "value"), [("budget_mib", 0), ("step", -1), ("rank", -2)])
def test_numbers_out_of_range_are_refused(tmp_path: Path, name: str, value: int) -> None:
    words = shlex.split(shared(tmp_path).elsewhere)
    raw = json.loads(words[words.index("--suspects") + 1])
    raw["suspects"][name] = value
    with pytest.raises(UsageError, match="out of range"):
        suspects.half(json.dumps(raw))


def test_the_bundle_needs_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("name: a\n")
    assert main(["refine", "--config", str(config), "-o", str(tmp_path / "x")]) != 0
    assert "--suspects" in capsys.readouterr().err


def test_the_page_gives_both_commands_until_it_is_refined(tmp_path: Path) -> None:
    results = Results(tmp_path, Alignment("a", str(tmp_path), {}, {}), tmp_path)
    assert _waits(results) == []
    plan = shared(tmp_path)
    suspects.write(tmp_path, plan)
    assert [command.text for command in _waits(results)] == [plan.elsewhere, plan.afterwards]
    (tmp_path / "refine" / "refined.json").write_text("{}")
    assert _waits(results) == []


def test_the_diagnosis_stands_and_says_what_is_to_be_done(tmp_path: Path) -> None:
    cause = Cause("unknown", "unknown", "nothing", ["seen"])
    found = Diagnosis("diverged", "it parts.", [], None, cause, {}, {}, [])
    told = awaited(found, shared(tmp_path))
    assert told.cause is not None and told.cause.evidence[0] == "seen"
    assert shared(tmp_path).elsewhere in told.cause.evidence[1]
    path = tmp_path / diagnosis.REFINED / diagnosis.NAME
    path.parent.mkdir()
    for place, each in ((tmp_path / diagnosis.NAME, found), (path, told)):
        place.write_text(json.dumps(each.as_dict()))
    assert diagnosis.answer(tmp_path).cause == told.cause
