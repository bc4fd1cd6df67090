"""``rlprobe diagnose``, ``verdict`` and ``report`` as a user calls them."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from rlprobe.cli import main
from rlprobe.cli.common import write_json
from rlprobe.diagnose import diagnosis, sentence
from rlprobe.diagnose.diagnosis import GateItem, StageResult
from rlprobe.documents import seal
from rlprobe.errors import DumpError
from rlprobe.judge.curves import Curve
from rlprobe.judge.inputs import Plan, Results, require
from rlprobe.report import commands
from tests.resealed import edited
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.planted import EPSILON, SHUT
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

KEYS = ["format", "verdict", "sentence", "gate", "first", "cause", "coverage", "noise", "stages",
        "extent", "curves", "rollout", "routing", "unheld", "judged", "of", "messages",
        "digest"]  # fmt: skip


def test_aligned_diverged_and_not_comparable_have_their_exit_codes(
    align: Align, capsys: pytest.CaptureFixture[str]
) -> None:
    shut = SHUT[0]
    expected = [
        (Device(split=True), 0, 0, "agree"),
        (Device(split=True, faults=EPSILON.faults, stage=EPSILON.only), 0, 3, "part in"),
        (Device(faults=shut.faults), 4, 4, "cannot be compared"),
    ]
    for number, (device, code, verdict_code, said) in enumerate(expected):
        alignment = align(device, repeat=False, name=f"n{number}")
        capsys.readouterr()
        assert main(["diagnose", str(alignment.results)]) == code
        assert capsys.readouterr().err.count(said) == 1
        assert main(["diagnose", str(alignment.results), "--no-fail", "-q"]) == 0
        capsys.readouterr()
        path = alignment.results / "diagnosis.json"
        assert main(["verdict", str(path)]) == verdict_code
        out = capsys.readouterr().out
        assert said in out and out.count("\n") == 1
        written = json.loads(path.read_text())
        assert list(written) == KEYS
        assert json.loads(json.dumps(diagnosis.read(path).as_dict())) == written


def test_what_is_not_finite_is_written_as_json_says_it_and_read_again(
    align: Align, tmp_path: Path
) -> None:
    found = align(Device(split=True), repeat=False).diagnose()
    curve = Curve(
        metric="actor/loss", verdict="left", step=0, steps=1, at=0, benchmark=0.5,
        target=math.nan, difference=math.inf, allowed=math.nan,
    )  # fmt: skip
    odd = msgspec.structs.replace(found, curves=[curve])
    path = tmp_path / "diagnosis.json"
    write_json(path, odd.as_dict())
    read = diagnosis.read(path).curves[0]
    assert (read.target, read.difference, read.allowed) == (None, None, None)


def test_one_reason_one_record_and_one_stage_are_not_several() -> None:
    plan = Plan("a", "store", {}, {})
    shut = [GateItem(f"item {n}", "shut", "seen") for n in range(4)]
    for count, said in ((2, "item 1: seen."), (3, "(and 1 more reason)."), (4, "2 more reasons).")):
        assert sentence.not_comparable(plan, shut[:count]).endswith(said)
    for count, said in (
        (1, "1 record of 1 stage lies within its"),
        (2, "2 records of 1 stage lie"),
    ):
        stage = StageResult("actor_update", "aligned", count, 0)
        assert said in sentence.aligned(plan, [stage], 0.5, 1, 0, [0], 0)
    assert "; 1 more differs only" in sentence.aligned(plan, [stage], 0.5, 1, 0, [0], 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a diagnosis"),
        ("{", "not a diagnosis"),
        ("[]", "format None"),
        ('{"format": 3}', "made by a newer rlprobe: its format is 3"),
        ('{"format": 1, "verdict": "fine"}', "not a diagnosis"),
    ],
)
def test_a_file_that_is_no_diagnosis_is_refused(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    assert main(["verdict", str(path)]) == 1
    assert message in capsys.readouterr().err
    assert main(["verdict", str(tmp_path / "none.json")]) == 2


def test_only_classes_of_the_list_are_causes(tmp_path: Path, align: Align) -> None:
    found = align(Device(split=True, faults=EPSILON.faults, stage=EPSILON.only)).diagnose()
    raw = found.as_dict()
    raw["cause"]["class"] = "gremlins"
    (tmp_path / "d.json").write_text(json.dumps(seal.sealed(raw)))
    with pytest.raises(DumpError, match="gremlins"):
        diagnosis.read(tmp_path / "d.json")


def test_the_page_is_one_file_that_needs_no_network(align: Align) -> None:
    alignment = align(Device(split=True, faults=EPSILON.faults, stage=EPSILON.only))
    assert main(["diagnose", str(alignment.results)]) == 0
    began = time.monotonic()
    assert main(["report", str(alignment.results)]) == 0
    assert time.monotonic() - began < 10
    page = (alignment.results / "report.html").read_text(encoding="utf-8")
    # the browser is told so as well, and tests/unit/diagnose/test_report_browser.py asks it
    assert "default-src 'none'" in page
    own = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    for word in ("src=", "@import", "url(", "<link"):
        assert word not in own
    assert not re.findall(r'href="(?!#|judged/|records\.csv")', own)
    assert not re.findall(r"https?://", own)
    assert "parts here" in page and "Diverged" in page
    plain = page.replace("<wbr>", "")
    assert "actor_compute_log_prob / model.layers.1.input_layernorm" in plain
    assert "What is 1+1?" in plain or "What is" in plain  # the sample's decoded text
    assert "the target trained on 4 of the 4 recorded samples" in plain  # in place of generation


def test_the_page_says_why_nothing_was_judged(align: Align) -> None:
    alignment = align(Device(faults=SHUT[1].faults), repeat=False)
    assert main(["diagnose", str(alignment.results), "--no-fail"]) == 0
    assert main(["report", str(alignment.results)]) == 0
    page = (alignment.results / "report.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "Not comparable" in page and "What refused the comparison" in page
    assert "its elements are permuted" in page


def test_hostile_names_and_texts_are_escaped(align: Align) -> None:
    alignment = align(Device(split=True, faults=EPSILON.faults, stage=EPSILON.only))
    with edited(alignment.results / "alignment.json") as plan:
        plan["name"] = "<script>alert(1)</script>\x1b[2J"
    assert main(["diagnose", str(alignment.results)]) == 0
    with edited(alignment.results / "diagnosis.json") as found:
        found["gate"][0]["evidence"] = "<img src=x onerror=alert(1)>"
    assert main(["report", str(alignment.results)]) == 0
    page = (alignment.results / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "<img" not in page and "\x1b" not in page
    assert "&lt;script&gt;" in page and "&lt;img src=x" in page


def test_judging_and_reporting_need_neither_torch_nor_a_framework(align: Align) -> None:
    alignment = align(Device(), repeat=False)
    program = (
        "import sys\n"
        "for name in 'torch msprobe ray verl transformers'.split(): sys.modules[name] = None\n"
        "from rlprobe.cli import main\n"
        f"assert main(['diagnose', {str(alignment.results)!r}]) == 0\n"
        f"assert main(['report', {str(alignment.results)!r}]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["project", "project/results/a", "elsewhere", "other/project"])
def test_a_page_s_commands_work_in_any_directory(
    align: Align, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A plan names its store as the workflow's directory does; a page is read in another shell."""
    alignment = align(Device(split=True, faults=EPSILON.faults, stage=EPSILON.only), repeat=False)
    results = tmp_path / "project/results/a"
    shutil.copytree(alignment.results, results)
    (tmp_path / "project/store").symlink_to(alignment.store)
    with edited(results / "alignment.json") as plan:
        plan["store"] = "store"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "other/project/store/runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / place)
    assert main(["diagnose", str(results), "--no-fail", "-q"]) == 0
    assert main(["report", str(results), "-q"]) == 0
    found = diagnosis.answer(results)
    opened = Results.open(results)
    sides = [require(opened, role) for role in ("benchmark", "target")]
    every = [*commands.next_steps(opened, found, *sides), *commands.in_a_script(opened, found)]
    monkeypatch.chdir(tmp_path / "elsewhere")
    for command in every:
        arguments = command.text.removeprefix(commands.program())
        assert main(shlex.split(arguments)) in (0, 3), command.text


def test_a_store_that_is_nowhere_is_named(
    align: Align,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = align(Device(split=True), repeat=False).results
    with edited(results / "alignment.json") as plan:
        plan["store"] = "nowhere/store"
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", str(results)]) == 1
    assert "is not in nowhere/store" in capsys.readouterr().err
