"""What could go unjudged in silence (tests/unjudged), tried on PPO with two mini-batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlprobe.judge import extent
from rlprobe.selftest.blind import score
from rlprobe.selftest.blind.laboratory import Judgement
from tests.e2e.conftest import command
from tests.unjudged import cases
from tests.unjudged.copy import Copy

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
ALIGNED = "split_k_in_two_updates"


@pytest.fixture(scope="module")
def results(workspace: Path) -> Path:
    directory = workspace / "unjudged"
    done = command(
        sys.executable, "-m", "rlprobe", "selftest", "--no-passes", "--no-ray", "--only", ALIGNED,
        "--directory", directory,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return directory / "results" / ALIGNED


@pytest.fixture(scope="module")
def before(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Judgement:
    found = judged(Copy(results, tmp_path_factory.mktemp("before")))
    assert isinstance(found, Judgement) and found.verdict == "aligned"
    return found


def judged(copy: Copy) -> Judgement | str:
    found = copy.judged()
    if isinstance(found, str):
        return found
    return Judgement(found.verdict, found.gate.items, found.extents)


@pytest.mark.parametrize("case", cases.CASES.values(), ids=list(cases.CASES))
def test_it_is_noticed(case: cases.Case, results: Path, before: Judgement, tmp_path: Path) -> None:
    copy = Copy(results, tmp_path)
    if case.needs is not None and not copy.files(cases.TARGET, case.needs):
        pytest.skip(f"this alignment recorded no {case.needs}")
    case.change(copy)
    after = judged(copy)
    outcome, why = score.outcome(before, after, None)
    assert outcome in (score.NOTICED, case.answer), why
    if case.answer == score.SAID:
        assert not isinstance(after, str)
        assert extent.total(after.extent).unjudged != extent.total(before.extent).unjudged
