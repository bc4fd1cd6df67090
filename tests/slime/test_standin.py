"""slime's whole way on this CPU: real Ray actors over the real megatron-core, to the report.

What stands in for slime, and what that proves, is in ``tests/slime/standin/README.md``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.installed import needs

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "slime" / "standin"
pytestmark = [pytest.mark.e2e, needs("megatron.core")]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout's directory with one store: what was collected once is replayed by every test.

    Not the repository's root: other tests run (and kill) workflows of their own there.
    """
    made = tmp_path_factory.mktemp("slime")
    for name in ("Snakefile", "workflow", "profiles", "config", "requirements", "tests"):
        (made / name).symlink_to(ROOT / name)
    return made


@dataclasses.dataclass
class Aligned:
    store: Path
    results: Path
    output: str
    status: int

    @property
    def diagnosis(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / "diagnosis.json").read_text())
        return found

    def dump(self, role: str) -> Path:
        key = json.loads((self.results / "alignment.json").read_text())["runs"][role]["key"]
        return self.store / "runs" / key / "dump"


def call(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root."""
    return call_in(ROOT, *words, **environ)


def call_in(
    directory: Path, *words: str | Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [str(word) for word in words],
        cwd=directory,
        env=env | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def align(workspace: Path) -> Callable[..., Aligned]:
    """Run an alignment with the project's own command."""

    def run(name: str, change: Callable[[dict[str, Any]], None] = lambda raw: None) -> Aligned:
        raw = yaml.safe_load((ROOT / "config/examples/slime_cpu.yaml").read_text())
        raw |= {"name": name, "store": f"{workspace}/store", "results": f"{workspace}/results"}
        # msprobe's own table is the same for every framework; tests/e2e has it
        raw["analysis"] = {"official_table": False}
        change(raw)
        path = workspace / f"{name}.yaml"
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
        done = call_in(workspace, "workflow/align", path)
        results = workspace / "results" / name
        return Aligned(workspace / "store", results, done.stdout, done.returncode)

    return run


@pytest.fixture(scope="module")
def aligned(align: Callable[..., Aligned]) -> Aligned:
    done = align("slime-cpu")
    assert done.status == 0, done.output[-4000:]
    return done


def names(dump: Path, stage: str, step: int = 0) -> list[str]:
    document = json.loads((dump / stage / f"step{step}" / "rank0" / "dump.json").read_text())
    return list(document["data"])


def test_the_example_is_aligned_across_two_versions_and_has_a_page(aligned: Aligned) -> None:
    """Benchmark as main, target as v0.2.2 with other kernels, from the same rollouts."""
    found = aligned.diagnosis
    assert found["verdict"] == "aligned", found["sentence"]
    captured = {stage["stage"] for stage in found["stages"] if stage["records"]}
    assert {"reference_compute_log_prob", "actor_compute_log_prob", "actor_update"} <= captured
    page = (aligned.results / "report.html").read_text(encoding="utf-8")
    assert "actor_compute_log_prob" in page


def test_the_tree_is_as_slimes_users_know_it_and_each_dump_is_clean(aligned: Aligned) -> None:
    for role in ("benchmark", "target"):
        dump = aligned.dump(role)
        stages = {path.name for path in dump.iterdir() if (path / "step0").is_dir()}
        assert stages == {"ref_compute_log_prob", "old_log_prob", "actor_train"}
        for step in (0, 1):
            reference = names(dump, "ref_compute_log_prob", step)
            assert reference == names(dump, "old_log_prob", step), "stage 2 holds stage 2 alone"
            update = names(dump, "actor_train", step)
            assert [name for name in update if ".forward." in name] == reference


def test_megatrons_modules_have_hugging_face_names(aligned: Aligned) -> None:
    recorded = names(aligned.dump("benchmark"), "old_log_prob")
    assert "Module.model.layers.1.mlp.down_proj.RowParallelLinear.forward.0" in recorded
    assert not any(".decoder.layers." in name for name in recorded)


def plant(raw: dict[str, Any]) -> None:
    raw["target"]["fault"] = "tests/slime/faults.py:rms_eps"


def unrefined(raw: dict[str, Any]) -> None:
    plant(raw)
    raw["refine"] = False


@pytest.mark.usefixtures("aligned")
def test_a_planted_fault_is_found_in_its_stage_and_module(align: Callable[..., Aligned]) -> None:
    done = align("slime-fault", unrefined)
    assert done.status == 0, done.output[-4000:]
    found = done.diagnosis
    assert found["verdict"] == "diverged", found["sentence"]
    assert found["first"]["stage"] == "actor_compute_log_prob"
    assert found["first"]["module"] == "model.layers.1.input_layernorm"
    assert "target: slime on cpu" in done.output
    assert "benchmark: slime on cpu" not in done.output, "it was collected before"


#: What the target is laid out as, against one rank.
LAYOUTS = {"dp2": [], "tp2": ["--tensor-model-parallel-size 2"]}


def laid_out(layout: str, fault: str = "") -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["refine"] = False
        raw["controls"] = {"repeat": False}
        # the example's benchmark has one rank and no records by coordinates
        raw["capture"] |= {"coordinate_sketch": True, "token_sketch": True}
        raw["target"] |= {"world_size": 2, "overrides": LAYOUTS[layout]}
        raw["target"] |= {"fault": f"tests/slime/faults.py:{fault}"} if fault else {}

    return change


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_are_aligned_with_one(align: Callable[..., Aligned], layout: str) -> None:
    done = align(f"slime-{layout}", laid_out(layout))
    assert done.status == 0, done.output[-4000:]
    found = done.diagnosis
    assert found["verdict"] == "aligned", found["sentence"]
    judged = {stage["stage"]: stage["records"] for stage in found["stages"]}
    assert judged["actor_compute_log_prob"] > 40 and judged["actor_update"] > 100, judged
    gate = {item["item"]: item for item in found["gate"]}
    assert "by sample, position and feature" in gate["coverage"]["evidence"], gate["coverage"]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("fault", "stage", "module"),
    [
        ("up", "reference_compute_log_prob", "model.layers.0.mlp.up_proj"),
        ("sent_back", "actor_update", "model.layers.0.mlp.down_proj"),
        ("rate", "actor_update", None),
    ],
)
def test_a_fault_on_two_ranks_is_found_against_one(
    align: Callable[..., Aligned], layout: str, fault: str, stage: str, module: str | None
) -> None:
    done = align(f"slime-{layout}-{fault}", laid_out(layout, fault))
    found = done.diagnosis
    assert found["verdict"] == "diverged", found["sentence"]
    assert (found["first"]["stage"], found["first"]["module"]) == (stage, module), found["sentence"]


@pytest.mark.long
@pytest.mark.usefixtures("aligned")
def test_refining_sees_the_epsilon(align: Callable[..., Aligned]) -> None:
    done = align("slime-refined", plant)
    assert done.status == 0, done.output[-4000:]
    refined = json.loads((done.results / "refine/diagnosis.json").read_text())
    assert refined["first"]["module"] == "model.layers.1.input_layernorm"
    assert (refined["cause"]["class"], refined["cause"]["known"]) == ("hyperparameter", "observed")


@pytest.mark.long
def test_one_file_carries_slimes_benchmark_to_another_site(
    aligned: Aligned, tmp_path: Path
) -> None:
    """The two halves of ``config/examples/two_sites/slime_*.yaml``, on the stand-in."""
    there = json.loads((aligned.results / "alignment.json").read_text())["runs"]
    keys = [there[role]["key"] for role in ("benchmark", "repeat")]
    bundle, store = tmp_path / "handover.rlprobe", tmp_path / "store"
    export = ("rlprobe", "store", "export", "--store", aligned.store)
    done = call(*export, "--alignment", "slime-cpu", "-o", bundle)
    assert done.returncode == 0, done.stdout
    digest = next(line for line in done.stdout.splitlines() if line.startswith("sha256:"))
    done = call("rlprobe", "store", "import", "--store", store, bundle, "--digest", digest)
    assert done.returncode == 0 and all(key in done.stdout for key in keys), done.stdout
    here = tmp_path / "here"
    here.mkdir()
    for name in ("Snakefile", "workflow", "profiles", "config", "requirements", "tests"):
        (here / name).symlink_to(ROOT / name)
    raw = yaml.safe_load((ROOT / "config/examples/slime_cpu.yaml").read_text())
    raw |= {"name": "handed-over", "store": str(store), "results": str(here / "results")}
    raw["analysis"] = {"official_table": False}
    raw["benchmark"] = {"run": keys[0], "device": "cpu", "precision": "fp32"}
    raw["controls"] = {"repeat": keys[1]}
    (here / "handed-over.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    # the target of the first site came along, and is not to be used: it is made here
    done = call_in(here, "rlprobe", "store", "rm", there["target"]["key"], "--store", store)
    assert done.returncode == 0, done.stdout
    done = call_in(here, "workflow/align", "handed-over.yaml")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "target: slime on cpu" in done.stdout and "benchmark: slime on cpu" not in done.stdout
    found = json.loads((here / "results/handed-over/diagnosis.json").read_text())
    assert found["verdict"] == "aligned", found["sentence"]
    assert found["coverage"] == aligned.diagnosis["coverage"]


def run(
    workspace: Path, name: str, change: Callable[[dict[str, Any]], None], role: str = "benchmark"
) -> Any:
    """One run of one step."""
    raw = yaml.safe_load((ROOT / "config/examples/slime_cpu.yaml").read_text())
    raw["name"] = name
    raw["steps"] = {"total": 1, "start": 0, "end": 0}
    change(raw)
    path = workspace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    store = workspace / "store"
    return call_in(workspace, "rlprobe", "run", "--config", path, "--role", role, "--store", store)


@pytest.mark.parametrize("role", ["benchmark", pytest.param("target", marks=pytest.mark.long)])
def test_a_critic_has_directories_of_its_own(workspace: Path, role: str) -> None:
    def ppo(raw: dict[str, Any]) -> None:
        raw["overrides"] = ["--advantage-estimator ppo", "--rollout-batch-size 2"]

    done = run(workspace, "slime-ppo", ppo, role)
    assert done.returncode == 0, done.stdout[-4000:]
    committed = workspace / "store" / "runs" / done.stdout.split()[-1]
    stages = {p.name for p in (committed / "dump").iterdir() if (p / "step0").is_dir()}
    assert stages == {"old_log_prob", "critic_values", "critic_train", "actor_train"}
    if role == "target":
        proof = json.loads((committed / "mock_proof.json").read_text())["samples"]
        assert {row["role"] for row in proof} == {"actor", "critic"}
        assert len({tuple(sorted(row["samples"])) for row in proof}) == 1, "the same samples"


@pytest.mark.long
def test_a_skipped_old_log_prob_is_no_stage_of_the_run_and_is_said(workspace: Path) -> None:
    def one_step(raw: dict[str, Any]) -> None:
        raw["overrides"] = [o for o in raw["overrides"] if "global-batch-size" not in o]

    done = run(workspace, "one-step", one_step)
    assert done.returncode == 0, done.stdout[-4000:]
    logs = sorted((workspace / "store" / "logs").iterdir(), key=lambda path: path.stat().st_mtime)
    assert "actor_compute_log_prob" not in done.stdout
    assert "slime did not run old_log_prob" not in logs[-1].read_text(), "it was not asked for"


@pytest.mark.long
def test_a_run_that_would_train_nothing_fails(workspace: Path, tmp_path: Path) -> None:
    """slime itself exits 0 here."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    flags = [
        "--hf-checkpoint", STANDIN / "model", "--prompt-data", STANDIN / "prompts.jsonl",
        "--load", tmp_path, "--num-rollout", "1",
    ]  # fmt: skip
    session = tmp_path / "session.json"
    from rlprobe.capture.session import Session

    made = Session(
        role="benchmark",
        framework="slime",
        dump=str(tmp_path / "dump"),
        side=str(tmp_path / "side"),
        expected_stages=("actor_update",),
    )
    session.write_text(made.to_json())
    done = by_rlprobe(flags, RLPROBE_CONFIG=str(session))
    assert done.returncode != 0
    assert "without a single rollout" in done.stdout
    assert "--start-rollout-id" in done.stdout


#: A Ray apart from any other on the machine, for runs that no alignment starts.
APART = {
    "RAY_ADDRESS": "local",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def by_rlprobe(flags: list[Any], **environ: str) -> Any:
    """slime's train.py, started as in a run."""
    module = "rlprobe.frameworks.slime.start"
    ours = {"RLPROBE_SLIME": str(STANDIN), "RLPROBE_SLIME_PRECISION": "fp32"}
    return call(sys.executable, "-m", module, *flags, **APART, **ours, **environ)


def by_itself(flags: list[Any], **environ: str) -> Any:
    """slime's train.py as its users start it; Ray alone is told that there are devices."""
    code = (
        "import ray, runpy, sys; sys.argv.pop(0); sys.path.insert(0, sys.argv[0][:-9]);"
        "ray.init(num_gpus=4, include_dashboard=False);"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    train, path = STANDIN / "train.py", {"PYTHONPATH": str(STANDIN)}
    return call(sys.executable, "-c", code, train, *flags, **APART, **path, **environ)


@pytest.mark.parametrize("on", ["0", "1"])
def test_without_dump_on_slime_is_as_it_was(tmp_path: Path, on: str) -> None:
    environ = {"RLPROBE_CONFIG": str(configuration(tmp_path)), "PYTHONPATH": str(STANDIN)}
    code = (
        "from slime.ray.rollout import RolloutManager as M\n"
        "found = M.__ray_metadata__.modified_class.generate\n"
        "while found is not None:\n"
        "    print(found.__code__.co_filename)\n"
        "    found = getattr(found, '__wrapped__', None)\n"
    )
    done = call(sys.executable, "-c", code, DUMP_ON=on, **environ)
    assert done.returncode == 0, done.stdout
    assert str(STANDIN / "slime/ray/rollout.py") in done.stdout
    assert ("rlprobe/frameworks/wrap.py" in done.stdout) is (on == "1")


def configuration(tmp_path: Path) -> Path:
    """msprobe's config.json, as slime's users write it."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "task": "statistics",
                "dump_path": str(tmp_path / "dump"),
                "rank": [],
                "step": [0],
                "level": "mix",
                "statistics": {"scope": [], "list": [], "summary_mode": "statistics"},
            }
        )
    )
    return config


@pytest.mark.long
def test_users_own_configuration(tmp_path: Path) -> None:
    """msprobe's config.json and DUMP_ON, with slime started as ever."""
    config = configuration(tmp_path)
    flags = [
        "--hf-checkpoint", STANDIN / "model", "--prompt-data", STANDIN / "prompts.jsonl",
        "--num-rollout", "2", "--global-batch-size", "2", "--use-kl-loss",
    ]  # fmt: skip
    done = by_itself(flags, RLPROBE_CONFIG=str(config), DUMP_ON="1")
    assert done.returncode == 0, done.stdout[-4000:]
    found = {path.name for path in (tmp_path / "dump").iterdir()}
    assert {"ref_compute_log_prob", "old_log_prob", "actor_train"} <= found
    for stage in ("ref_compute_log_prob", "old_log_prob", "actor_train"):
        rank = tmp_path / "dump" / stage / "step0" / "rank0"
        assert {p.name for p in rank.iterdir()} == {"dump.json", "stack.json", "construct.json"}
        assert not (rank.parents[1] / "step1").exists()
    reference = names(tmp_path / "dump", "ref_compute_log_prob")
    # the first stage has no calls more for what Megatron remembers later, such as rotary embeddings
    assert reference == names(tmp_path / "dump", "old_log_prob")
    assert any(name.startswith("Functional.") for name in reference), "level mix has calls too"
    # as by the vendor's procedure, which passes msprobe the list of chunks
    assert any(name.startswith("Module.0.module.decoder.layers.1.") for name in reference)


@pytest.mark.long
def test_each_step_is_judged_from_the_benchmarks_state(align: Callable[..., Aligned]) -> None:
    """The second step begins from weights and moments that the benchmark kept."""
    done = align("slime-rejoined", lambda raw: raw["controls"].update(rejoin=True))
    assert done.status == 0, done.output[-4000:]
    found = done.diagnosis
    assert found["verdict"] == "aligned", found["sentence"]
    for stage in ("actor_compute_log_prob", "actor_update"):
        first, second = (found["extent"][stage][step] for step in ("0", "1"))
        assert second["judged"] == first["judged"] > 0.9 * first["recorded"]
