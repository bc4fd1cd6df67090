"""A real checkout of slime, where one is at hand.

``RLPROBE_SLIME_CHECKOUT=DIR`` names it: its source then must have every hook point.
``RLPROBE_MEGATRON=DIR`` names the Megatron-LM it is made for: slime's own manager and actor are
then run on this machine's CPU (``on_cpu/README.md``), with the interpreter
``RLPROBE_SLIME_PYTHON`` where this one lacks what slime needs. ``RLPROBE_SLIME_ALIGNMENT=FILE``
names an alignment with ``framework: slime`` that this machine can run: its benchmark and its target
are run with the hooks. Without them these tests are skipped, and nothing here says that a real
slime works.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlprobe import stages
from rlprobe.capture.session import CaptureOptions, ReplayOptions, Session
from rlprobe.config import load
from rlprobe.frameworks.slime import hooks, manager_paths, plan, versions
from rlprobe.rollouts import hdf5
from rlprobe.runs.plan import plan as runs_of
from tests.slime.on_cpu import inputs

CHECKOUT = os.environ.get("RLPROBE_SLIME_CHECKOUT")
ALIGNMENT = os.environ.get("RLPROBE_SLIME_ALIGNMENT")

needs_checkout = pytest.mark.skipif(
    not CHECKOUT,
    reason="RLPROBE_SLIME_CHECKOUT names no checkout of slime: no real slime was looked at",
)
MEGATRON = os.environ.get("RLPROBE_MEGATRON")
ON_CPU = Path(__file__).parent / "on_cpu"

needs_megatron = pytest.mark.skipif(
    not (CHECKOUT and MEGATRON),
    reason="RLPROBE_SLIME_CHECKOUT and RLPROBE_MEGATRON name no checkouts: no real slime was run",
)
needs_alignment = pytest.mark.skipif(
    not ALIGNMENT,
    reason="RLPROBE_SLIME_ALIGNMENT names no alignment: no real slime was run",
)

#: Where hook points are defined, when not in the module that is hooked.
_DEFINED_IN = {
    ("train", hooks.ACTOR): "slime/backends/megatron_utils/model.py",
    ("forward_only", hooks.ACTOR): "slime/backends/megatron_utils/model.py",
    ("loss_function", hooks.MODEL): "slime/backends/megatron_utils/loss.py",
}


def arguments(path: Path, name: str) -> list[str] | None:
    """Arguments of a function or method by its dotted name, None where it does not exist."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name == part
        ]
        if not found:
            return None
        node = found[-1]
        if isinstance(node, ast.ClassDef):
            body = node.body
            continue
        spec = node.args
        return [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return None


@needs_checkout
@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in hooks.REQUIRED.items() for name in names],
)
def test_the_source_has_the_hook_point(module: str, name: str) -> None:
    assert CHECKOUT is not None
    file = _DEFINED_IN.get((name, module), module.replace(".", "/") + ".py")
    found = arguments(Path(CHECKOUT) / file, name)
    assert found is not None, f"{file} has no {name}"
    assert set(hooks.REQUIRED[module][name]) <= set(found)


@needs_checkout
def test_actor_uses_the_functions_it_imports() -> None:
    """``train`` and ``forward_only`` are wrapped in actor.py: it must call them by those names."""
    assert CHECKOUT is not None
    text = (Path(CHECKOUT) / "slime/backends/megatron_utils/actor.py").read_text(encoding="utf-8")
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {"train", "forward_only"} <= calls


class Real:
    """Runs of the checkout's own manager and actor in one process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.flags = [*inputs.FLAGS, *inputs.make(directory)]

    def run(
        self, name: str, *more: str, replay: Path | None = None, recorded: Path | None = None
    ) -> tuple[Path, subprocess.CompletedProcess[str]]:
        out = self.directory / name
        out.mkdir()
        wanted = (stages.REFERENCE, stages.LOG_PROB, stages.ACTOR_UPDATE)
        session = Session(
            role="target" if replay else "benchmark",
            framework="slime",
            dump=str(out / "dump"),
            side=str(out / "side"),
            capture=CaptureOptions(stages=wanted, step_start=0, step_end=1),
            expected_stages=wanted,
            replay=ReplayOptions(path=str(replay)) if replay else None,
        )
        (out / "session.json").write_text(session.to_json())
        kind = manager_paths.REPLAYED if replay else manager_paths.RECORDED
        template = manager_paths.template(out / "side", kind)
        files = ["--load-debug-rollout-data", template]
        if recorded:
            loaded = str(recorded / "{rollout_id}.pt")
            files = ["--load-debug-rollout-data", loaded, "--save-debug-rollout-data", template]
        assert CHECKOUT is not None
        done = subprocess.run(
            [
                os.environ.get("RLPROBE_SLIME_PYTHON") or sys.executable, str(ON_CPU / "whole.py"),
                *self.flags, *more, *files,
            ],
            cwd=CHECKOUT,
            env=os.environ | {
                "PYTHONPATH": os.pathsep.join([CHECKOUT, str(ON_CPU), str(MEGATRON)]),
                "RLPROBE_CONFIG": str(out / "session.json"),
                "RLPROBE_SLIME_PRECISION": "fp32",
                "SLIME_ACCELERATOR": "cuda",
                "TORCHDYNAMO_DISABLE": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )  # fmt: skip
        return out, done


TWO_STEPS = ("--global-batch-size", "2")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    return Real(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def benchmark(real: Real) -> Path:
    out, done = real.run("benchmark", *TWO_STEPS, recorded=real.directory / "recorded")
    assert done.returncode == 0, done.stdout[-6000:]
    return out


def calls(run: Path, stage: str, step: int) -> dict[str, Any]:
    path = run / "dump" / plan.DIRECTORIES[stage] / f"step{step}" / "rank0" / "dump.json"
    found: dict[str, Any] = json.loads(path.read_text())["data"]
    return found


@needs_megatron
def test_its_stages_are_dumped_each_alone(benchmark: Path) -> None:
    for step in (0, 1):
        reference = list(calls(benchmark, stages.REFERENCE, step))
        assert reference == list(calls(benchmark, stages.LOG_PROB, step))
        update = calls(benchmark, stages.ACTOR_UPDATE, step)
        assert [name for name in update if ".forward." in name] == reference
        kinds = {
            record["dtype"]
            for entry in update.values()
            for record in entry.get("parameters", {}).values()
        }
        assert kinds <= {"torch.float32"}, "full precision was asked for"


@needs_megatron
def test_it_replays_what_was_recorded_of_any_version(real: Real, benchmark: Path) -> None:
    """Also what another version recorded: ``RLPROBE_SLIME_RECORDED`` names its rollouts."""
    recorded = Path(os.environ.get("RLPROBE_SLIME_RECORDED") or benchmark / "side" / "rollouts")
    out, done = real.run("target", *TWO_STEPS, replay=recorded)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "4 samples replayed" in done.stdout
    assert [hdf5.read(path).samples for path in hdf5.steps(recorded).values()] == [
        hdf5.read(path).samples for path in hdf5.steps(benchmark / "side" / "rollouts").values()
    ]
    first = [calls(run, stages.LOG_PROB, 0) for run in (benchmark, out)]
    assert first[0] == first[1]


@needs_megatron
def test_a_skipped_old_log_prob_is_said(real: Real) -> None:
    actor = Path(str(CHECKOUT)) / "slime/backends/megatron_utils/actor.py"
    skips = "can_reuse_log_probs_in_loss" in actor.read_text(encoding="utf-8")
    _, done = real.run("one-step", "--global-batch-size", "4", recorded=real.directory / "recorded")
    assert ("slime did not run old_log_prob" in done.stdout) is skips, done.stdout[-3000:]
    assert (done.returncode != 0) is skips


@needs_alignment
@pytest.mark.e2e
@pytest.mark.parametrize("role", ["benchmark", "target"])
def test_a_run_of_real_slime(role: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every stage is captured, under slime's name for it, with nothing of another stage."""
    assert ALIGNMENT is not None
    store = Path(os.environ.get("RLPROBE_SLIME_STORE") or tmp_path_factory.getbasetemp() / "store")
    done = subprocess.run(
        [
            sys.executable, "-c", "import sys; from rlprobe.cli import main; sys.exit(main())",
            "run", "--config", ALIGNMENT, "--role", role, "--store", str(store),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    spec = runs_of(load(ALIGNMENT))[role]
    run = store / "runs" / spec.key
    manifest = json.loads((run / "manifest.json").read_text())
    captured = {s for s, state in manifest["stages"].items() if state["state"] == "captured"}
    assert captured == set(spec.stages)
    step = f"step{spec.steps.start}"
    dumps = {
        stage: json.loads(
            next((run / "dump" / plan.DIRECTORIES[stage] / step).glob("*/dump.json")).read_text()
        )
        for stage in captured
    }
    forwards = [
        [name for name in dump["data"] if ".forward." in name or name.endswith(".forward")]
        for stage, dump in dumps.items()
        if "critic" not in stage
    ]
    assert all(found == forwards[0] for found in forwards), "the stages run the same forward"
    if role != "benchmark":
        proof = json.loads((run / "mock_proof.json").read_text())
        assert proof


def test_the_versions_said_to_be_known_have_signatures(root: Path) -> None:
    tags = json.loads((root / "tests/slime/signatures.json").read_text())
    for version in versions.KNOWN:
        assert ("HEAD" if version == "main" else f"v{version}") in tags
    assert manager_paths.RECORDED != manager_paths.REPLAYED
