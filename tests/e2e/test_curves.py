"""Twenty real steps of training: do curves of a correct device stay, and does a late fault show?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.diagnose.diagnosis import ALIGNED, DIVERGED
from rlprobe.judge.curves import LEFT, WITHIN
from rlprobe.report.plain import markdown
from rlprobe.selftest import catalogue
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.selftest.pipeline import Judged, Pipeline, Trial

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

SINCE = 5
CASES = f'''
from rlprobe.faults.patching import swapped
from rlprobe.selftest import benign, fault

NEEDS = {{"steps": 20, "captured": 1, "perturbed": 3}}


@benign(needs=NEEDS)
def other_kernels(site):
    yield


@fault(stage="actor_update", cause="optimizer", needs=NEEDS)
def late_decay(site):
    """Weight decay that grows from 0.01 to 2 at step {SINCE}."""
    groups = site.optimizer.param_groups
    kept = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 2.0 if site.step >= {SINCE} else group["weight_decay"]
    yield
    for group, decay in zip(groups, kept, strict=True):
        group["weight_decay"] = decay
'''


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, servers: ForkServers) -> Pipeline:
    return Pipeline(tmp_path_factory.mktemp("curves"), servers, servers)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, catalogue.Case]:
    directory = tmp_path_factory.mktemp("cases")
    (directory / "late.py").write_text(CASES)
    return {case.name: case for case in catalogue.cases([directory])}


@pytest.fixture(scope="module")
def clean(pipeline: Pipeline, cases: dict[str, catalogue.Case]) -> Judged:
    return pipeline.judge(Trial(cases["other_kernels"]))


@pytest.fixture(scope="module")
def late(pipeline: Pipeline, cases: dict[str, catalogue.Case], clean: Judged) -> Judged:
    return pipeline.judge(Trial(cases["late_decay"]))


def test_twenty_steps_of_a_correct_device_have_a_verdict(clean: Judged) -> None:
    found = clean.diagnosis
    assert found.verdict == ALIGNED, found.sentence
    verdicts: list[str] = [curve.verdict for curve in found.curves]
    assert verdicts.count(WITHIN) > 30
    assert LEFT not in verdicts
    assert "Curves over 20 steps against 3 perturbed runs" in found.sentence
    assert all(found.extent["trainer"][step].judged > 30 for step in range(20))


def test_a_fault_of_a_later_step_leaves_there_and_not_before(late: Judged) -> None:
    found = late.diagnosis
    assert found.verdict == DIVERGED
    assert found.first is not None and found.first.stage == "trainer"
    assert SINCE <= found.first.step <= SINCE + 2, "the update of step 5 shows in step 6"
    assert found.cause is not None and "captur" in " ".join(found.cause.evidence)
    assert f"step {found.first.step}" in found.sentence
    left = [curve for curve in found.curves if curve.verdict == LEFT]
    assert min(curve.step or 0 for curve in left) == found.first.step
    assert f"| {found.first.operator}".replace("_", r"\_") in markdown(found)


def test_page_and_exit_code_say_the_same(late: Judged) -> None:
    assert main(["report", str(late.directory)]) == 0
    page = (late.directory / "report.html").read_text()
    assert late.diagnosis.first is not None
    assert str(late.diagnosis.first.operator) in page
    assert "leaves what chaos makes" in page
    assert main(["verdict", str(late.directory)]) == 3


def test_the_runs_metrics_are_judged_the_same_without_the_alignment(
    late: Judged, clean: Judged, tmp_path: Path
) -> None:
    plan = json.loads((late.directory / "alignment.json").read_text())
    runs = {
        role: str(Path(plan["store"], "runs", run["key"])) for role, run in plan["runs"].items()
    }
    controls = [runs[role] for role in sorted(runs) if role.startswith("perturbed")]
    assert len(controls) == 3
    words = ["curves", runs["benchmark"], runs["target"], "--replayed", "fp32", "--perturbed"]
    words += controls
    assert main([*words, "--json", str(tmp_path / "c.json")]) == 3
    own = json.loads((clean.directory / "alignment.json").read_text())["runs"]["target"]["key"]
    words[2] = str(Path(plan["store"], "runs", own))
    assert main(words) == 0
