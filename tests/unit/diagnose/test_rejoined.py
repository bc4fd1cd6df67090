"""Steps that each begin from the benchmark's state: each is judged as the first is."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.diagnose.gate import checkpoint
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.diagnose.run import diagnose
from rlprobe.judge import curves, reasons, tables
from rlprobe.judge.analysis import Step
from rlprobe.judge.inputs import Plan, PlannedPair, PlannedRun, Results, write
from rlprobe.refine import suspects
from rlprobe.report.content import gather
from rlprobe.store.commit import commit
from rlprobe.store.keys import run_key
from rlprobe.store.manifest import Manifest
from rlprobe.store.read import Run
from tests.unit.diagnose import transformer
from tests.unit.diagnose.conftest import CAPTURE
from tests.unit.diagnose.planted import EPSILON
from tests.unit.diagnose.transformer import STAGES, Device

pytestmark = pytest.mark.slow

STEPS = 3
LOG_PROB, UPDATE = STAGES[1], STAGES[2]
#: What a process says when it has loaded the benchmark's state.
LOADED: dict[str, Any] = {
    "parameters": 21, "states": 21, "optimizer": "AdamW", "rounded": [], "generators": None,
}  # fmt: skip
Said = Callable[[int], dict[str, Any] | None]


def leave(scratch: Path, devices: Sequence[Device], role: str, said: Said | None = None) -> None:
    """What a run of several steps leaves, each step of weights and rollouts of its own."""
    for step, device in enumerate(devices):
        own = scratch.with_name(f"{scratch.name}-{step}")
        transformer.run(own, device, role)
        for path in sorted((own / "dump").rglob("step0")):
            target = scratch / "dump" / path.relative_to(own / "dump").with_name(f"step{step}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
        shutil.copytree(
            own / "dump",
            scratch / "dump",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("step*"),
        )
        for path in sorted((own / "side").rglob("*")):
            place = scratch / "side" / path.relative_to(own / "side")
            if path.is_dir():
                continue
            if path.suffix == ".h5":
                place = place.with_name(f"step{step}.h5")
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix != ".jsonl":
                shutil.move(path, place)
                continue
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            with place.open("a") as file:
                file.writelines(
                    json.dumps({**row, "step": step}) + "\n" for row in rows if row["step"] == 0
                )
        line = said(step) if said is not None else None
        if line is not None:
            place = scratch / "side/parts/joined/actor-rank0.jsonl"
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("a") as file:
                file.write(json.dumps({"step": step, **line}) + "\n")


def loaded(step: int) -> dict[str, Any] | None:
    return LOADED if step else None


@dataclasses.dataclass
class Bench:
    """One store for all tests: runs without faults are made once."""

    root: Path
    made: dict[str, str] = dataclasses.field(default_factory=dict)
    count: int = 0

    def align(
        self,
        faults: dict[int, Device] | None = None,
        *,
        joined: bool = True,
        said: Said = loaded,
        repeat: str | None = "joined",
        benchmark: dict[int, Device] | None = None,
    ) -> Path:
        """Results of a target with other kernels, and of a step with what is wrong in it."""
        store = self.root / "store"
        plain = {step: Device(seed=step) for step in range(STEPS)} | (benchmark or {})
        target = {step: Device(split=True, seed=step) for step in range(STEPS)} | (faults or {})
        made = {
            "benchmark": (plain, {}, None),
            "target": (target, {"rejoin": True} if joined else {}, said if joined else None),
        }
        if repeat is not None:
            other = {**plain, 1: dataclasses.replace(plain[1], faults=EPSILON.faults)}
            its = repeat == "joined"
            made["repeat"] = (plain if its else other, {"rejoin": True} if its else {}, loaded)
        keys: dict[str, str] = {}
        for role, (devices, declares, says) in made.items():
            known = repr((role, devices, declares))
            odd = says not in (loaded, None) or any(device.faults for device in devices.values())
            if odd or known not in self.made:
                self.count += 1
                scratch = self.root / f"{role}{self.count}"
                leave(scratch, list(devices.values()), role, says)
                common = {"role": role, "device": "cpu", "precision": "fp32", "capture": CAPTURE}
                declared = common | {"replay_of": keys.get("benchmark"), **declares}
                declared["name"] = scratch.name
                keys[role] = run_key(declared)
                commit(scratch, store, keys[role], declared)
                if not odd:
                    self.made[known] = keys[role]
            else:
                keys[role] = self.made[known]
        others = [role for role in keys if role != "benchmark"]
        results = self.root / f"results{self.count}-{len(list(self.root.iterdir()))}"
        write(
            results / "alignment.json", name="a", store=store,
            runs={role: PlannedRun(key, "cpu", "fp32", list(STAGES)) for role, key in keys.items()},
            pairs={role: PlannedPair("benchmark", role, list(STAGES)) for role in others},
        )  # fmt: skip
        for role in others:
            left, right = (store / "runs" / keys[r] for r in ("benchmark", role))
            both = sides.resolve(str(left)), sides.resolve(str(right))
            compare(*both, results / "compare" / role, Options(role, STAGES))
        return results


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("rejoined"))


def item(found: Diagnosis, name: str) -> Any:
    return next((one for one in found.gate if one.item == name), None)


def wrong(step: int, stage: str, **faults: Any) -> dict[int, Device]:
    return {step: Device(split=True, seed=step, stage=stage, faults=faults or EPSILON.faults)}


def test_every_step_is_judged(bench: Bench) -> None:
    results = bench.align()
    found = diagnose(results)
    assert found.verdict == "aligned", found.sentence
    assert "Steps 0 to 2 were judged, each from the benchmark's state." in found.sentence
    first = found.extent[LOG_PROB]
    assert set(first) == {0, 1, 2} and len({one.judged for one in first.values()}) == 1
    for steps in found.extent.values():
        assert not any(reasons.LATER_STEP in one.unjudged for one in steps.values())
    assert all(step.judged == step.recorded == 1 for step in found.extent["trainer"].values())
    assert {curve.why for curve in found.curves} == {curves.JOINED}
    assert "not judged (each step began from the benchmark's state" in found.sentence
    cells = {cell.stage: cell.records for cell in found.stages}
    assert cells[LOG_PROB] == sum(one.judged for one in first.values())
    began = item(found, "state at the start")
    assert began.state == "open" and began.evidence.startswith("steps 1 and 2: weights of 21")
    assert "curves" in began.evidence
    assert item(found, "weights over steps") is None, "a joined run's weights always move alike"
    assert item(found, "stages and steps").state == "open"
    assert item(found, "weights").state == "open"


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_fault_of_a_later_step_is_found_there(bench: Bench, step: int) -> None:
    results = bench.align(wrong(step, UPDATE))
    found = diagnose(results)
    assert found.first is not None, found.sentence
    assert (found.verdict, found.first.step, found.first.stage) == ("diverged", step, UPDATE)
    assert found.first.module == EPSILON.module
    before = "Step 0 before it agrees." if step == 1 else "Steps 0 and 1 before it agree."
    assert found.sentence.count(before) == 1
    (results / "diagnosis.json").write_text(json.dumps(found.as_dict()))
    wanted = suspects.find(results, 1).suspects
    assert wanted is not None and (wanted.step, wanted.stage) == (step, UPDATE)
    opened = Results.open(results)
    assert tables.read(opened, found.judged).number == step
    table = tables.read_table(opened, UPDATE)
    beyond = table.filter(pl.col("beyond")).get_column("step").unique().to_list()
    assert beyond == [step]


def test_the_first_of_several_faults_decides_and_the_others_are_in_the_tables(bench: Bench) -> None:
    results = bench.align(wrong(1, UPDATE, **{"learning rate": 2e-3}) | wrong(2, LOG_PROB))
    found = diagnose(results)
    assert found.first is not None and found.cause is not None
    assert (found.first.step, found.first.stage) == (1, UPDATE)
    assert found.cause.class_ == "optimizer"
    table = tables.read_table(Results.open(results), LOG_PROB)
    assert table.filter(pl.col("beyond")).get_column("step").unique().to_list() == [2]


def test_without_rejoining_a_later_step_is_not_judged_and_the_caveat_names_the_way(
    bench: Bench,
) -> None:
    found = diagnose(bench.align(wrong(1, UPDATE), joined=False))
    assert found.verdict == "aligned"
    assert "Only step 0 was judged; 2 later steps give trends." in found.sentence
    caveat = item(found, "stages and steps")
    assert caveat.state == "caveat" and "controls.rejoin: true" in caveat.action
    assert found.extent[UPDATE][1].judged == 0
    assert found.extent["trainer"][0].judged == 1, "held against the records of its step"
    assert found.extent["trainer"][1].unjudged == {reasons.METRIC: 1}
    assert item(found, "state at the start") is None


def heavier(weights: dict[str, Any]) -> dict[str, Any]:
    return {**weights, "model.norm.weight": weights["model.norm.weight"] * 2}


def test_weights_that_differ_after_loading_shut_the_gate_at_that_step(bench: Bench) -> None:
    device = Device(split=True, seed=2, faults={"weights": heavier})
    found = diagnose(bench.align({2: device}))
    assert found.verdict == "not_comparable" and found.first is not None
    assert found.first.step == 2
    shut = item(found, "weights")
    assert shut.state == "shut" and shut.evidence.startswith("step 2: ")
    assert "model.norm.weight" in found.sentence


def left(moved: int) -> Said:
    """What a process says of the weights that it overwrites at step 2."""

    def said(step: int) -> dict[str, Any] | None:
        gone = moved if step == 2 else 0
        names = ["model.norm.weight"] * gone
        return LOADED | {"left": {"compared": 21, "moved": gone, "names": names}} if step else None

    return said


def test_weights_that_move_between_two_updates_shut_the_gate_at_the_step_behind_them(
    bench: Bench,
) -> None:
    """Loading the benchmark's state hides them from whatever runs after it."""
    found = diagnose(bench.align(said=left(1)))
    assert found.verdict == "not_comparable", found.sentence
    began = item(found, "state at the start")
    assert began.state == "shut" and "between its own update and step 2" in began.evidence
    assert "model.norm.weight" in began.evidence
    assert found.first is not None and found.cause is not None
    assert (found.first.stage, found.first.step) == (UPDATE, 1)
    assert (found.first.module, found.cause.class_) == ("model.norm", "weights")


def test_weights_that_stay_between_two_updates_are_said_and_so_is_what_was_not_recorded(
    bench: Bench,
) -> None:
    began = item(diagnose(bench.align(said=left(0))), "state at the start")
    assert began.state == "open" and "21 parameters were before it what" in began.evidence
    began = item(diagnose(bench.align()), "state at the start")
    assert began.state == "open" and "was not recorded" in began.evidence


def test_a_divergence_before_it_is_not_hidden_by_a_step_that_cannot_be_compared(
    bench: Bench,
) -> None:
    device = Device(split=True, seed=2, faults={"weights": heavier})
    found = diagnose(bench.align(wrong(1, LOG_PROB) | {2: device}))
    assert found.first is not None
    assert (found.verdict, found.first.step, found.first.stage) == ("diverged", 1, LOG_PROB)


@pytest.mark.parametrize(
    ("said", "state", "text"),
    [
        (lambda step: LOADED if step == 1 else None, "shut", "not loaded at step 2: actor on rank"),
        (
            lambda step: {**LOADED, "rounded": ["exp_avg of lm_head.weight"]} if step else None,
            "caveat",
            "cannot hold the benchmark's: exp_avg of lm_head.weight",
        ),
        (
            lambda step: {**LOADED, "generators": "this device is npu"} if step else None,
            "open",
            "not all put back (this device is npu)",
        ),
    ],
)
def test_what_was_not_loaded_is_said(bench: Bench, said: Said, state: str, text: str) -> None:
    found = diagnose(bench.align(said=said))
    began = item(found, "state at the start")
    assert (began.state, text in began.evidence) == (state, True), began.evidence
    assert (found.verdict == "not_comparable") == (state == "shut")


LEFT = {"compared": 21, "moved": 0, "names": []}


def says(odd: dict[str, Any], *steps: int) -> Said:
    """Something else at some steps."""

    def said(step: int) -> dict[str, Any] | None:
        return LOADED | {"left": LEFT} | (odd if step in steps else {}) if step else None

    return said


@pytest.mark.parametrize(
    ("odd", "state", "text"),
    [
        ({"parameters": 20}, "shut", "actor on rank 0: 20 of 21 parameters"),
        ({"states": 0}, "shut", "actor on rank 0: 0 of 21 optimizer states"),
        ({"parameters": 22}, "caveat", "says that it loaded 22 parameters, where 21 are known"),
        ({"states": 22}, "caveat", "says that it loaded 22 optimizer states, where 21 are known"),
        ({"parameters": None}, "caveat", "does not say how many parameters it loaded"),
        ({"states": None}, "caveat", "does not say how many optimizer states it loaded"),
        ({"optimizer": "SGD"}, "caveat", "is one of SGD, others of "),
        ({"optimizer": None}, "caveat", "is one of nothing that is said, others of AdamW"),
        ({"left": LEFT | {"compared": 20}}, "caveat", "20 parameters were compared with"),
        ({"left": LEFT | {"names": ["a"]}}, "caveat", "says that 0 parameters moved and names a"),
    ],
)
def test_a_count_of_what_was_loaded_is_held_against_the_repeats(
    bench: Bench, odd: dict[str, Any], state: str, text: str
) -> None:
    found = diagnose(bench.align(said=says(odd, 1, 2)))
    began = item(found, "state at the start")
    assert (began.state, text in began.evidence) == (state, True), began.evidence
    assert (found.verdict == "not_comparable") == (state == "shut")


@pytest.mark.parametrize(
    ("odd", "state", "text"),
    [
        ({"parameters": 20}, "shut", "20 of 21 parameters"),
        ({"states": 22}, "shut", "21 of 22 optimizer states"),
        ({"optimizer": "SGD"}, "caveat", "is one of SGD, others of AdamW"),
        ({"left": None}, "caveat", "does not say what its own updates had left"),
    ],
)
def test_a_count_of_what_was_loaded_is_held_against_other_steps(
    bench: Bench, odd: dict[str, Any], state: str, text: str
) -> None:
    found = diagnose(bench.align(said=says(odd, 1), repeat=None))
    began = item(found, "state at the start")
    assert (began.state, text in began.evidence) == (state, True), began.evidence


@pytest.mark.long
def test_a_repeat_that_was_not_joined_is_no_measure_of_a_joined_step(bench: Bench) -> None:
    """It differs by what its own updates left, which would widen floors until nothing is seen."""
    found = diagnose(bench.align(wrong(1, LOG_PROB), repeat="its own way"))
    assert found.first is not None, found.sentence
    assert (found.first.step, found.first.stage) == (1, LOG_PROB)


@pytest.mark.long
def test_the_page_says_which_steps_were_judged(bench: Bench) -> None:
    results = bench.align(wrong(2, LOG_PROB))
    found = diagnose(results)
    (results / "diagnosis.json").write_text(json.dumps(found.as_dict()))
    opened = Results.open(results)
    runs = [opened.run(role) for role in ("benchmark", "target")]
    assert all(isinstance(run, Run) for run in runs)
    page = gather(opened, found, tables.read(opened), *runs)  # type: ignore[arg-type]
    assert (page.step, page.judged_steps, page.joined) == (2, [0, 1, 2], True)
    assert page.card is not None
    assert [value for label, value, _ in page.card.pairs if "Step" in str(label)] == ["2"]


@pytest.mark.parametrize(
    ("benchmark", "target", "state"),
    [
        (None, None, None),
        ("300:ab", "300:ab", "open"),
        ("300:ab", "300:cd", "shut"),
        ("300:ab", None, "shut"),
        (None, "200:ab", "shut"),
    ],
)
def test_both_sides_begin_from_one_checkpoint(
    benchmark: str | None, target: str | None, state: str | None
) -> None:
    one, other = (
        Run(
            Path(),
            Path(),
            Manifest.model_construct(key="", role="", files=[], declared={"resume_from": said}),
        )
        for said in (benchmark, target)
    )
    results = Results(Path(), Plan("a", "", {}, {}), Path())
    found = checkpoint.check(Evidence(results, one, other, {}, Step(0)))
    assert (None if found is None else found.state) == state
    if state == "shut":
        assert found is not None and "collect the benchmark with it" in found.action
