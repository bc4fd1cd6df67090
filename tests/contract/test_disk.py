"""The disk a run takes: guessed before it, limited while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlprobe import stages
from rlprobe.capture.session import CaptureOptions
from rlprobe.config import load
from rlprobe.doctor import size
from tests.contract.conftest import RUN
from tests.contract.runs import Runs
from tests.e2e.server import Variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.contract]

SIX = tuple(stage for stage in stages.STAGES if stage not in (stages.FORCED, stages.TEACHER))


def written(variant: Variant) -> int:
    """Bytes of what capture left."""
    found = [variant.dump, variant.side]
    return sum(
        path.stat().st_size for place in found for path in place.rglob("*") if path.is_file()
    )


@pytest.mark.cell("disk", "rlprobe estimate, against the default run", RUN)
def test_the_guess_is_above_what_is_written_and_near_it(made: Runs) -> None:
    variant = made.session("estimated", deterministic=False)
    guess = size.of_roles(load(made.work / "config.yaml"))
    assert guess is not None
    found = written(variant)
    assert found < guess["benchmark"].bytes < 6 * found, f"{found} bytes written"


@pytest.mark.cell("disk", "capture.budget_mib stops a run, keeping what is complete", RUN)
def test_a_budget_stops_the_run_cleanly(made: Runs) -> None:
    unlimited = made.session("estimated", deterministic=False)
    options = CaptureOptions(stages=SIX, step_end=1, token_range=(0, 1), budget_mib=1)

    def run() -> Variant:
        return made.server.run("budget", made.spec, capture=options, deterministic=False)

    variant = made.once("budget", run, may_fail=True)
    assert variant.status != 0
    assert "the capture budget of 1 MiB is spent" in variant.error
    assert "everything captured until here is complete" in variant.error
    captured = {
        (path.parts[-4], path.parts[-3]) for path in variant.dump.glob("*/step*/rank*/dump.json")
    }
    everything = {
        (path.parts[-4], path.parts[-3]) for path in unlimited.dump.glob("*/step*/rank*/dump.json")
    }
    assert captured
    assert captured < everything
    for stage, step in captured:
        place = Path(stage, step, "rank0", "dump.json")
        ours, theirs = (json.loads((v.dump / place).read_text()) for v in (variant, unlimited))
        assert ours["data"].keys() == theirs["data"].keys(), place
    assert not list(variant.dump.rglob("*.partial"))


def test_more_is_guessed_of_more(made: Runs) -> None:
    alignment = load(made.work / "config.yaml")
    usual = size.of_alignment(alignment)
    assert usual is not None
    capture = alignment.capture
    for changes in ({"task": "tensor", "engine": "msprobe"}, {"level": "mix", "engine": "msprobe"}):
        more = alignment.model_copy(update={"capture": capture.model_copy(update=changes)})
        found = size.of_alignment(more)
        assert found is not None
        assert found.bytes > usual.bytes
