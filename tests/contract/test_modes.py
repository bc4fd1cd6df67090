"""Mock inference: every loading mode, and what happens where a step or a row is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlprobe.rollouts import hdf5
from rlprobe.rollouts.order import ReplayOrder
from tests.contract.conftest import RUN
from tests.contract.runs import Runs, Tree
from tests.e2e.server import Variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.contract]

#: Every step asks for the same prompts, so that any recorded step fits any other.
SAME_PROMPTS = "data.train_max_samples=4"
STEPS = "trainer.total_training_steps="


@pytest.fixture(scope="module")
def recorded(made: Runs) -> Path:
    """Two collected steps, with no dump switched on: the rollouts alone."""
    variant = made.collector("recorded", SAME_PROMPTS, msprobe=True, step_end=1)
    assert sorted(hdf5.steps(variant.dump / "rollouts")) == [0, 1]
    return variant.dump


def replayed(
    made: Runs, name: str, recorded: Path, steps: int, *overrides: str, **options: Any
) -> Variant:
    """A mock run of so many steps that writes its key data."""
    return made.collector(
        f"mock-{name}",
        SAME_PROMPTS,
        f"{STEPS}{steps}",
        *overrides,
        may_fail=True,
        msprobe=True,
        key_data_dump=True,
        step_end=9,
        enable_mock_inference=True,
        **{"mock_data_path": str(recorded), **options},
    )


def responses(tree: Path, step: int) -> set[bytes]:
    """The responses trained on in a step."""
    return {row.tobytes() for part in Tree(tree).key("responses", step=step) for row in part}


def of_recording(recorded: Path, step: int) -> set[bytes]:
    """The responses recorded for a step."""
    found = hdf5.read(recorded / f"rollouts/step{step}.h5").tensors["responses"]
    assert isinstance(found, np.ndarray)
    return {row.tobytes() for row in found}


def mock(name: str) -> pytest.MarkDecorator:
    return pytest.mark.cell("mock", name, RUN)


@mock("enable_mock_inference")
@mock("mock_data_path")
@mock("mock_random_seed")
@pytest.mark.cell("mock mode", "None: by the real step", RUN)
def test_by_the_real_step(made: Runs, recorded: Path) -> None:
    variant = replayed(made, "real", recorded, 2, mock_random_seed=None)
    assert variant.status == 0, variant.log[-2500:]
    assert of_recording(recorded, 0) != of_recording(recorded, 1)
    for step in (0, 1):
        assert responses(variant.dump, step) == of_recording(recorded, step)
    assert not (variant.dump / "rollouts").exists()


@mock("mock_step_start")
@mock("mock_step_end")
@pytest.mark.cell("mock mode", "-1: cycle through the range", RUN)
def test_cycle(made: Runs, recorded: Path) -> None:
    variant = replayed(made, "cycle", recorded, 3, mock_random_seed=-1, mock_step_end=1)
    assert variant.status == 0, variant.log[-2500:]
    for step, source in enumerate((0, 1, 0)):
        assert responses(variant.dump, step) == of_recording(recorded, source)
    late = replayed(
        made, "cycle-late", recorded, 2, mock_random_seed=-1, mock_step_start=1, mock_step_end=1
    )
    for step in (0, 1):
        assert responses(late.dump, step) == of_recording(recorded, 1)


@pytest.mark.cell("mock mode", "any other number: a seeded random sequence", RUN)
def test_random(made: Runs, recorded: Path) -> None:
    order = ReplayOrder((0, 1), 7, 0, 1)
    drawn = [order.recorded(step) for step in range(3)]
    assert len(set(drawn)) == 2, "choose a seed that draws both"
    variant = replayed(made, "random", recorded, 3, mock_random_seed=7, mock_step_end=1)
    assert variant.status == 0, variant.log[-2500:]
    for step, source in enumerate(drawn):
        assert responses(variant.dump, step) == of_recording(recorded, source)


@pytest.mark.cell("mock mode", "a vendor's dump_path with data/ alone", RUN)
def test_the_vendors_own_tree(made: Runs, recorded: Path) -> None:
    """The vendor's tool keeps data/ and no rollout file."""
    found = hdf5.read(recorded / "rollouts/step0.h5").tensors
    vendors = made.work / "vendors"
    for name in ("prompts", "responses", "attention_mask", "position_ids", "input_ids"):
        value = found[name]
        assert isinstance(value, np.ndarray)
        for micro in range(2):
            place = vendors / f"data/{name}/step0/rank0/micro_step{micro}"
            place.mkdir(parents=True, exist_ok=True)
            np.save(place / f"{name}.npy", value[4 * micro : 4 * micro + 4])
    variant = replayed(made, "vendor", vendors, 1, mock_random_seed=None)
    assert variant.status == 0, variant.log[-2500:]
    assert responses(variant.dump, 0) == of_recording(recorded, 0)


@pytest.mark.cell("mock mode", "what is missing is named", RUN)
@pytest.mark.parametrize(
    ("name", "steps", "overrides", "options", "said"),
    [
        ("beyond", 3, (), {"mock_random_seed": None}, "step 2 was not recorded; recorded: 0-1"),
        (
            "gap",
            1,
            (),
            {"mock_random_seed": -1, "mock_step_end": 5},
            "step 2 of the range 0..5 was not recorded",
        ),
        (
            "reversed",
            1,
            (),
            {"mock_random_seed": -1, "mock_step_start": 1, "mock_step_end": 0},
            "mock_step_start: found 1, after mock_step_end 0",
        ),
        (
            "size",
            1,
            (
                "data.train_batch_size=2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "critic.ppo_mini_batch_size=2",
            ),
            {"mock_random_seed": None},
            "holds 8 samples, but this step asks for 4",
        ),
        ("nowhere", 1, (), {"mock_data_path": "/nowhere"}, "/nowhere is no directory"),
        ("prompts", 1, ("data.shuffle=true", "data.train_max_samples=-1"), {}, "rows differ"),
    ],
)
def test_what_does_not_fit_is_named(
    made: Runs,
    recorded: Path,
    name: str,
    steps: int,
    overrides: tuple[str, ...],
    options: dict[str, Any],
    said: str,
) -> None:
    variant = replayed(made, name, recorded, steps, *overrides, **options)
    assert variant.status != 0
    assert said in variant.error
