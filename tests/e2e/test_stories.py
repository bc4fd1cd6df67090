"""From an alignment to a folder that shows the divergence with plain torch: three whole stories.

Through the self-test's pipeline (real replays in one process), and the project's own commands for
bundles and folders.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.run import diagnose
from rlprobe.documents import seal
from rlprobe.judge.inputs import NAME as PLAN
from rlprobe.refine import decide, refined, suspects
from rlprobe.runs.jobs import Jobs
from rlprobe.runs.launch import launch
from rlprobe.runs.plan import pairs, plan
from rlprobe.runs.suspects import half, refining
from rlprobe.selftest import catalogue
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.selftest.pipeline import Judged, Pipeline, Trial
from rlprobe.store.exporting import export
from rlprobe.store.read import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

FAULTS = """
import torch
from rlprobe.faults.patching import swapped
from rlprobe.selftest import fault

NORM = "model.layers.1.post_attention_layernorm"
GATE = "model.layers.0.mlp.act_fn"

@fault(stage="actor_compute_log_prob", module=NORM, cause="hyperparameter")
def larger_epsilon(site):
    with swapped(site.model.get_submodule(NORM), "variance_epsilon", 1e-2):
        yield

@fault(stage="critic_update", cause="optimizer")
def undecayed(site):
    groups = site.optimizer.param_groups
    kept = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 1.0
    yield
    for group, decay in zip(groups, kept):
        group["weight_decay"] = decay

@fault(stage="actor_update", module=GATE, cause="implementation")
def gate_without_its_slope(site):
    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.nn.functional.silu(x)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * torch.sigmoid(x)

    with swapped(site.model.get_submodule(GATE), "forward", Silu.apply):
        yield
"""

Judge = Callable[[str], tuple[Judged, Trial]]


@pytest.fixture(scope="module")
def judge(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    directory = tmp_path_factory.mktemp("stories")
    (directory / "mine.py").write_text(FAULTS)

    def run(name: str) -> tuple[Judged, Trial]:
        trial = Trial(catalogue.cases([directory], [name])[0])
        return pipeline.judge(trial), trial

    return run


def folder(results: Path, out: Path) -> str:
    """Write the folder and run its script, which must show the divergence; what it printed."""
    assert main(["reproduce", str(results), "-o", str(out)]) == 0
    # isolated: no project, no site of the user's, from another directory
    words = [sys.executable, "-I", str(out / "reproduce.py"), "--device", "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=out)
    assert done.returncode == 3, done.stdout + done.stderr
    return done.stdout


def test_a_fault_of_the_optimizer(pipeline: Pipeline, judge: Judge, tmp_path: Path) -> None:
    judged, trial = judge("undecayed")
    found = pipeline.refine(trial, judged).diagnosis
    assert found.cause is not None and found.cause.known == "observed", found.cause
    assert found.cause.statement.startswith("weight_decay 1")
    shown = folder(judged.directory, tmp_path / "out")
    assert "weight_decay 1" in shown and "they differ by more than" in shown
    # every parameter's change, run in fp64 too
    assert shown.count("against the benchmark's in fp64: benchmark ") > 20
    assert shown.count("target's operators on cpu against the benchmark's: 0\n") == 0


def test_a_fault_of_a_backward_pass(pipeline: Pipeline, judge: Judge, tmp_path: Path) -> None:
    judged, trial = judge("gate_without_its_slope")
    found = pipeline.refine(trial, judged).diagnosis
    assert found.first is not None and found.first.module == "model.layers.0.mlp.act_fn"
    assert found.cause is not None
    assert (found.cause.class_, found.cause.known) == ("implementation", "observed"), found.cause
    assert "aten::sigmoid (backward of SiluBackward)" in found.cause.statement
    shown = folder(judged.directory, tmp_path / "out")
    assert "aten::sigmoid" in shown
    # the device computes as the host: what each side's operators make there is what they made
    said = json.loads((tmp_path / "out" / "about.json").read_text())
    assert said["module"] == "model.layers.0.mlp.act_fn" and ".backward." in said["record"]


def test_a_fault_between_two_sites(
    pipeline: Pipeline, judge: Judge, servers: ForkServers, tmp_path: Path
) -> None:
    _, trial = judge("larger_epsilon")
    there = pipeline._jobs(trial).alignment
    store_there = pipeline._store.absolute()
    origin = plan(there)["benchmark"].key
    # the first site hands its benchmark over
    bundle = tmp_path / "handover.rlprobe"
    words = ["store", "export", "--store", str(store_there), origin, "-o", str(bundle)]
    assert main(words) == 0
    here = tmp_path / "here"
    store = here / "store"
    assert main(["store", "import", "--store", str(store), str(bundle)]) == 0

    # the second runs its target against it
    alignment = there.model_copy(
        update={
            "benchmark": there.benchmark.model_copy(update={"run": origin}),
            "controls": there.controls.model_copy(update={"repeat": False}),
            "store": str(store),
            "results": str(here / "results"),
        }
    )
    runs = plan(alignment, environ={})
    launch(runs["target"], store, start=servers)
    jobs = Jobs(alignment, runs, pairs(runs))
    results = Path(jobs.results)
    left, right = (
        sides.resolve(str(store / "runs" / runs[role].key)) for role in ("benchmark", "target")
    )
    compare(left, right, results / "compare" / "target", Options("target", jobs.stages("target")))
    (results / PLAN).write_text(json.dumps(seal.sealed(jobs.described())))
    before = diagnose(results)
    (results / diagnosis.NAME).write_text(json.dumps(before.as_dict()))
    assert before.verdict == "diverged" and before.first is not None

    # it asks the first for its half of the refinement
    wanted = suspects.find(results, 64)
    assert wanted.suspects is not None
    asked = suspects.shared(wanted, here / "config.yaml", results, store)
    suspects.write(results, asked)
    told = shlex.split(asked.elsewhere)
    text = told[told.index("--suspects") + 1]
    request = suspects.half(text)
    spec = half(there, request.suspects, request.benchmark)
    launch(spec, store_there, start=servers)
    answer = tmp_path / told[told.index("-o") + 1]
    export(store_there, [spec.key], answer)
    # nothing of the first site is needed from here on
    kept = shutil.move(answer, here / answer.name)
    after = shlex.split(asked.afterwards.split(" && ", maxsplit=1)[0])
    after[after.index(answer.name)] = str(kept)
    assert main(after[1:]) == 0

    # and goes on with it
    own = refining(alignment, wanted.suspects)
    assert list(own) == ["target"]
    launch(own["target"], store, start=servers)
    other = suspects.kept_elsewhere(store, asked)
    assert other is not None and other.key == spec.key
    pair = other, Run.open(store, own["target"].key)
    refined.write(results, refined.refine(asked, wanted.suspects, *pair))
    sharper = decide.sharpened(results, diagnosis.current(results))
    assert sharper.cause is not None
    assert (sharper.cause.class_, sharper.cause.known) == ("hyperparameter", "observed")
    assert sharper.cause.statement.startswith("epsilon 0.01 on the target instead of 1e-06")
    assert sharper.cause.statement in sharper.sentence
    (results / diagnosis.REFINED / diagnosis.NAME).write_text(json.dumps(sharper.as_dict()))
    shown = folder(results, tmp_path / "out")
    assert "epsilon 0.01 on the target instead of 1e-06" in shown


def test_the_folder_says_nothing_where_the_fault_is_mended(
    pipeline: Pipeline, judge: Judge, tmp_path: Path
) -> None:
    """The kernel team's answer: with the right operators on the target the script exits 0."""
    judged, trial = judge("larger_epsilon")
    pipeline.refine(trial, judged)
    out = tmp_path / "out"
    folder(judged.directory, out)
    for end in ("json", "safetensors"):
        shutil.copy(out / f"benchmark.{end}", out / f"target.{end}")
    words = [sys.executable, "-I", str(out / "reproduce.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
