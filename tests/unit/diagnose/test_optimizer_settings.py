"""What an optimizer was told is no number with round-off: it differs or it does not."""

from __future__ import annotations

from typing import Any

import pytest

from rlprobe import stages
from rlprobe.cli import main
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.diagnosis import Diagnosis, GateItem
from rlprobe.diagnose.gate import recorded
from rlprobe.diagnose.gate import told as gate
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.judge import optimizers
from rlprobe.judge.inputs import Results
from rlprobe.judge.judge import judge
from rlprobe.refine import suspects
from tests.sampled import every_second
from tests.unit.diagnose import transformer
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.planted import EPSILON
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

NAMES = list(transformer.weights(0))
NORMS = [name for name in NAMES if "norm" in name]
SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
Groups = list[dict[str, Any]]


def groups(names: list[str] = NAMES, **others: Any) -> Groups:
    """All parameters in one group, or these of them in one of their own."""
    rest = [name for name in NAMES if name not in names]
    of_rest = [{"settings": SETTINGS, "names": rest}] if rest else []
    return [{"settings": SETTINGS | others, "names": names}, *of_rest]


def device(*updates: Groups, **faults: Any) -> dict[str, Any]:
    told = {(0, number): own for number, own in enumerate(updates or (groups(),))}
    return {"told": {0: told}, **faults}


def held(
    align: Align, target: dict[str, Any], benchmark: dict[str, Any] | None = None
) -> Diagnosis:
    both = [Device(split=True, faults=target), Device(faults=benchmark or device())]
    return align(both[0], benchmark=both[1]).diagnose()


def item(found: Diagnosis) -> GateItem | None:
    return next((item for item in found.gate if item.item == gate.ITEM), None)


def test_a_rate_that_no_change_shows_is_found_by_what_was_told(align: Align) -> None:
    alignment = align(
        Device(split=True, faults=device(groups(lr=1.02e-3))), benchmark=Device(faults=device())
    )
    assert main(["diagnose", str(alignment.results)]) == 0
    found = diagnosis.read(alignment.results / "diagnosis.json")
    assert found.verdict == "diverged" and found.first is not None and found.cause is not None
    first = found.first
    assert (first.stage, first.module, first.operator) == (stages.ACTOR_UPDATE, None, "optimizer")
    assert (found.cause.class_, found.cause.known) == ("hyperparameter", "observed")
    assert "lr 0.00102 on the target instead of 0.001 in update 0" in found.cause.statement
    assert "less than their floor" in found.cause.evidence[1]
    assert "noise floor" not in found.sentence.partition("Cause")[0], found.sentence
    strip = {cell.stage: cell.state for cell in found.stages}
    assert strip[stages.ACTOR_UPDATE] == "diverged"
    said = item(found)
    assert said is not None and said.state == "caveat"
    # what is looked at again is the update
    plan = suspects.find(alignment.results, 1)
    assert plan.suspects is not None and plan.suspects.trace == suspects.UPDATE


def test_what_is_told_alike_is_open_and_aligned(align: Align) -> None:
    found = held(align, device(groups(lr=1e-3 * (1 + 1e-9))))
    said = item(found)
    assert found.verdict == "aligned" and said is not None and said.state == "open", found.sentence
    assert f"{len(NAMES)} parameters" in said.evidence


def test_the_numbers_are_said_where_they_show_it(align: Align) -> None:
    found = held(align, device(groups(lr=1.5e-3), **{"learning rate": 1.5e-3}))
    assert found.cause is not None and found.cause.known == "observed", found.sentence
    assert "times its noise floor" in found.sentence
    assert "changes of parameters are beyond their floor" in found.cause.evidence[1]


@pytest.mark.parametrize(
    ("setting", "value", "cause"),
    [
        ("betas", [0.9, 0.95], "hyperparameter"),
        ("weight_decay", 0.0, "hyperparameter"),
        ("amsgrad", True, "optimizer"),
    ],
)
def test_any_setting_of_one_module_is_found_there(
    align: Align, setting: str, value: Any, cause: str
) -> None:
    own = [name for name in NAMES if name.endswith("layers.1.mlp.down_proj.weight")]
    benchmark = device([{**g, "settings": {"amsgrad": False} | g["settings"]} for g in groups()])
    found = held(align, device(groups(own, **{"amsgrad": False, setting: value})), benchmark)
    assert found.first is not None, found.sentence
    assert found.first.module == own[0].removesuffix(".weight")
    assert found.cause is not None and setting in found.cause.statement
    assert found.cause.class_ == cause


@pytest.mark.long
def test_the_update_that_was_told_otherwise_is_named(align: Align) -> None:
    """What is not said again stays: a schedule that moves on one side alone."""
    both = device(groups(), groups(lr=5e-4))
    assert held(align, both, both).verdict == "aligned"
    found = held(align, device(groups()), both)
    assert found.cause is not None and "0.001 on the target" in found.cause.statement
    assert "in update 1 of the stage" in found.cause.statement


def test_a_schedule_that_parts_in_a_step_that_is_not_judged_is_a_caveat(align: Align) -> None:
    benchmark, target = device(), device()
    for side, rate in ((benchmark, 9e-4), (target, 1e-3)):
        side["told"][0][1, 0] = groups(lr=rate)
    with_steps = [
        Device(split=split, faults=side) for split, side in ((True, target), (False, benchmark))
    ]
    alignment = align(with_steps[0], benchmark=with_steps[1])
    results = Results.open(alignment.results)
    ours, theirs = results.run("benchmark"), results.run("target")
    assert ours is not None and theirs is not None
    later = optimizers.compare(ours, theirs, stages.ACTOR_UPDATE, 1)
    assert later is not None and [one.name for one in later.settings] == ["lr"]
    for run in (ours, theirs):
        object.__setattr__(run.manifest, "steps", [0, 1])
    said = gate.check(Evidence(results, ours, theirs, {}, judge(results, 0)))
    assert said is not None and said.state == "caveat"
    assert "actor_update of step 1, update 0: lr 0.001 on the target" in said.evidence


def test_a_rank_of_its_own_is_named(align: Align) -> None:
    target = device()
    target["told"][1] = {(0, 0): groups(lr=0.0)}
    found = held(align, target)
    assert found.cause is not None and "on rank 1 alone" in found.cause.statement


def test_what_parts_before_the_optimizer_steps_stays_the_first(align: Align) -> None:
    said = device(groups(lr=2e-3))
    early = Device(split=True, faults=EPSILON.faults | said, stage=EPSILON.only)
    found = align(early, benchmark=Device(faults=device())).diagnose()
    assert found.first is not None and found.first.stage == EPSILON.only
    name = next(name for name in NAMES if name.endswith("o_proj.weight"))
    found = held(align, said | {f"weight gradient {name}": lambda g: g * 1.1})
    assert found.first is not None and found.first.module == name.removesuffix(".weight")
    seen = item(found)
    assert seen is not None and "lr 0.002" in seen.evidence


@pytest.mark.long
def test_decay_that_one_back_end_leaves_out_is_said_and_no_divergence(align: Align) -> None:
    target = device(groups(NORMS, weight_decay=0.0), backend="megatron")
    benchmark = device(backend="FSDPEngine")
    found = held(align, target, benchmark)
    said = item(found)
    assert found.verdict == "aligned" and said is not None, found.sentence
    assert said.state == "caveat" and f"for {len(NORMS)} of {len(NAMES)}" in said.evidence
    # of one back end it is what somebody told it, and so is another decay than none
    assert held(align, target, benchmark | {"backend": "megatron"}).verdict == "diverged"
    other = device(groups(NORMS, weight_decay=0.1), backend="megatron")
    assert held(align, other, benchmark).verdict == "diverged"


@pytest.mark.long
def test_a_side_or_a_setting_that_is_not_said_is_held_against_nothing(align: Align) -> None:
    assert item(held(align, {"told": {}})) is None
    found = held(align, device(groups(bias_correction=False)))
    assert found.verdict == "aligned", found.sentence
    other = [{"settings": SETTINGS, "names": ["another.weight"]}]
    said = item(held(align, device(other)))
    assert said is not None and said.state == "caveat" and "no parameters" in said.evidence


@pytest.mark.parametrize(
    ("told", "named"),
    every_second(
        [
            (
                [{"settings": {k: v for k, v in SETTINGS.items() if k != "eps"}, "names": NAMES}],
                "eps",
            ),
            (groups(bias_correction=False), "bias_correction"),
            ([{"settings": SETTINGS, "names": NAMES[1:]}], NAMES[0]),
        ]
    ),
)
def test_what_one_side_alone_says_is_no_agreement(align: Align, told: Groups, named: str) -> None:
    said = alike(held(align, device(told)))
    assert said is not None and said.state == "caveat" and f"was told: {named}" in said.evidence


def test_what_one_rank_alone_does_not_say_is_no_agreement(align: Align) -> None:
    """Another rank's word stands for that rank alone."""
    both = [device(), device()]
    for side in both:
        side["told"][1] = {(0, 0): groups()}
    lacking = {name: value for name, value in SETTINGS.items() if name != "lr"}
    both[1]["told"][1] = {(0, 0): [{"settings": lacking, "names": NAMES}]}
    said = alike(held(align, both[1], both[0]))
    assert said is not None and "was told: lr" in said.evidence


LACKING = [name for name in NAMES if "down_proj" not in name]


@pytest.mark.parametrize(
    ("told", "named", "lacks"),
    every_second(
        [
            ([{"settings": SETTINGS, "names": NAMES[1:]}], NAMES[0], "target"),
            ([{"settings": SETTINGS, "names": LACKING}], "down_proj", "benchmark"),
            (None, NAMES[0], "target"),  # the rank says nothing at all
        ]
    ),
)
def test_a_parameter_that_one_rank_alone_lacks_is_named(
    align: Align, told: Groups | None, named: str, lacks: str
) -> None:
    full, less = device(), device()
    full["told"][1] = {(0, 0): groups()}
    if told is not None:
        less["told"][1] = {(0, 0): told}
    said = alike(held(align, *((less, full) if lacks == "target" else (full, less))))
    assert said is not None and "was told: " in said.evidence and named in said.evidence


@pytest.mark.parametrize("setting", every_second([{"lr": 2e-3}, {"weight_decay": 0.0}]))
def test_ranks_that_were_told_each_others_settings_are_named(
    align: Align, setting: dict[str, Any]
) -> None:
    """What a rank was told is held against what that rank was told."""
    both = [device(), device()]
    for side, rank in zip(both, (0, 1), strict=True):
        side["told"][0] = {(0, 0): groups(**(setting if rank == 0 else {}))}
        side["told"][1] = {(0, 0): groups(**(setting if rank == 1 else {}))}
    found = held(align, both[1], both[0])
    assert found.verdict == "diverged" and found.cause is not None, found.sentence
    assert next(iter(setting)) in found.cause.statement and "on rank" in found.cause.statement
    assert held(align, both[0], both[0]).verdict == "aligned"


def test_a_side_that_says_nothing_of_its_optimizer_is_named(align: Align) -> None:
    said = alike(held(align, {"told": {}}, device()))
    assert said is not None and "actor_update: one side alone says" in said.evidence
    # a later update that is told as the one before says nothing else
    assert alike(held(align, device(groups(), groups()), device())) is None
    # optimizers of unlike back ends have settings of their own
    target = device(groups(bias_correction=False), backend="megatron")
    assert alike(held(align, target, device(backend="FSDPEngine"))) is None


def alike(found: Diagnosis) -> GateItem | None:
    return next((item for item in found.gate if item.item == recorded.ITEM), None)
