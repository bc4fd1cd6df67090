"""Other versions of verl, each really run in an environment of its own (versions.mk makes them).

    make versions

The same cells for every version, so that a row of the table says where one differs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe import stages
from rlprobe.rollouts import hdf5
from tests.contract.conftest import RUN
from tests.contract.runs import ROOT, Runs, Tree
from tests.contract.test_modes import of_recording, responses
from tests.contract.test_trainers import FOUR, GRPO, LORA, ONE_STEP, SIX, heads, key_data
from tests.e2e.expected import EVERYTHING
from tests.e2e.server import Variant

pytestmark = [
    pytest.mark.e2e, pytest.mark.slow, pytest.mark.msprobe, pytest.mark.contract,
    pytest.mark.timeout(1200),
]  # fmt: skip

#: The project's own environment has the last one that is named.
VERSIONS = ("0.8.0", "0.9.0", "0.9.1", "newest")
OWN = "0.9.1"
#: 0.8.0 has one trainer.
WITH_V1 = VERSIONS[1:]
#: What a version needs for msprobe's layers besides: 0.8 divides logits in place, and with
#: msprobe's hooks FSDP2 then frees the head's weights before its backward (docs/collector.md).
_FURTHER = {"0.8.0": ("actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false",)}
#: Prints what verl is installed, and which of its requirements are not met.
_LOOK = """
import importlib.metadata as m, json
from packaging.requirements import Requirement
def met(r):
    try: return r.specifier.contains(m.version(r.name), prereleases=True)
    except m.PackageNotFoundError: return False
wanted = [Requirement(text) for text in m.requires("verl")]
lacking = [str(r) for r in wanted if not r.marker and not met(r)]
print(json.dumps([m.version("verl"), lacking]))
"""


@dataclasses.dataclass(frozen=True)
class Environment:
    """One that has a version of verl."""

    version: str
    python: Path
    lock: Path
    lacking: tuple[str, ...]

    @property
    def path(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.python.parent}:{os.environ['PATH']}"}


@functools.cache
def environment(name: str) -> Environment | str:
    """The environment of a version; why it is not run where there is none."""
    if name == OWN:
        python, lock = Path(sys.executable), ROOT / "requirements/lock.txt"
    else:
        place = Path(os.environ.get("RLPROBE_VERSIONS", ROOT)) / f".venv-verl-{name}"
        python, lock = place / "bin/python", ROOT / f"requirements/verl-{name}.txt"
    if not python.exists():
        return f"no environment of verl {name}: make versions"
    done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, check=True)
    version, lacking = json.loads(done.stdout)
    if name == "newest" and version in VERSIONS:
        return f"the newest verl is {version}, which is run above"
    return Environment(version, python, lock, tuple(lacking))


def cell(name: str) -> pytest.MarkDecorator:
    return pytest.mark.cell("versions of verl", name, RUN)


def everywhere(name: str, versions: tuple[str, ...] = VERSIONS) -> Any:
    """A cell of each version."""
    parameters = [pytest.param(v, marks=cell(f"{v}: {name}")) for v in versions]
    return pytest.mark.parametrize("there", parameters, indirect=True)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Runs]]:
    """The runs of each version."""
    found: dict[str, Runs] = {}
    yield found
    for runs in found.values():
        runs.__exit__()


@dataclasses.dataclass(frozen=True)
class There:
    """A version, and what was run of it."""

    environment: Environment
    runs: Runs

    def collector(self, name: str, *overrides: str, **options: Any) -> Variant:
        """verl without Ray, with a collector file of these options."""
        further = _FURTHER.get(self.environment.version, ())
        return self.runs.collector(name, ONE_STEP, *overrides, *further, **options)

    def under_ray(self, name: str, *overrides: str, **options: Any) -> Variant:
        """verl as its own command line starts it, with everything switched on."""
        return self.runs.ray(name, ONE_STEP, *overrides, **options, **EVERYTHING)

    def everything(self) -> Variant:
        """PPO with a critic, everything switched on."""
        return self.collector("everything", token_range_end=1, **EVERYTHING)


@pytest.fixture
def there(
    request: pytest.FixtureRequest,
    places: dict[str, Runs],
    tmp_path_factory: pytest.TempPathFactory,
) -> There:
    found = environment(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    if found.version not in places:
        kept = os.environ.get("RLPROBE_CONTRACT_DIR")
        name = f"verl-{found.version}"
        work = Path(kept) / name if kept else tmp_path_factory.mktemp(name)
        places[found.version] = Runs(work, found.version, str(found.python)).__enter__()
    return There(found, places[found.version])


@everywhere("what it requires is installed")
def test_its_own_requirements_are_met(there: There) -> None:
    assert there.environment.lacking == ()


@everywhere("an alignment, PPO with a critic, replayed and judged")
def test_an_alignment(there: There) -> None:
    work = there.runs.work
    raw = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    raw |= {
        "name": "versions", "framework_version": there.environment.version,
        "store": str(work / "store"), "results": str(work / "results"),
    }  # fmt: skip
    for side in ("benchmark", "target"):
        raw[side]["lock"] = str(there.environment.lock)
    config = work / "versions.yaml"
    config.write_text(yaml.safe_dump(raw))
    done = subprocess.run(
        ["workflow/align", str(config)], cwd=ROOT, env=there.environment.path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    results = work / "results/versions"
    found = json.loads((results / "diagnosis.json").read_text())
    assert found["verdict"] == "aligned", found["sentence"]
    judged = {stage: sum(s["judged"] for s in of.values()) for stage, of in found["extent"].items()}
    assert {stage for stage, count in judged.items() if count > 20} >= SIX - {stages.GENERATE}
    key = json.loads((results / "alignment.json").read_text())["runs"]["benchmark"]["key"]
    environment = json.loads((work / "store/runs" / key / "environment.json").read_text())
    assert f'"verl": "{there.environment.version}"' in json.dumps(environment)
    for path in (results / "compare/repeat").glob("*/summary.json"):
        summary = json.loads(path.read_text())
        alike = summary["identical"] + summary["no_difference_seen"]
        assert alike == summary["compared"] > 0, path


@everywhere("the collector, everything switched on")
def test_the_collector(there: There) -> None:
    variant = there.everything()
    tree = Tree(variant.dump)
    assert tree.stages() == {stage: {"step0"} for stage in SIX}
    assert heads(variant, stages.LOG_PROB) == heads(variant, stages.REFERENCE) == 4
    for name in ("responses", "old_log_probs", "ref_log_prob", "values", "advantages"):
        assert len(key_data(variant.dump).rows(name, 0)) == 8, name
    assert len(tree.key("actor_grad_norm")) == 1
    assert (variant.dump / "configurations.json").is_file()
    assert len(hdf5.read(variant.dump / "rollouts/step0.h5")) == 8


@everywhere("mock inference of what it recorded")
def test_mock_inference(there: There) -> None:
    recorded = there.everything().dump
    ours = there.collector(
        "mock", "actor_rollout_ref.rollout.name=rlprobe_replay", msprobe=True, key_data_dump=True,
        enable_mock_inference=True, mock_data_path=str(recorded),
    ).dump  # fmt: skip
    assert responses(ours, 0) == of_recording(recorded, 0)
    for name in ("old_log_probs", "ref_log_prob", "values", "advantages"):
        one, other = (Tree(tree).key(name) for tree in (ours, recorded))
        assert [a.tobytes() for a in one] == [a.tobytes() for a in other], name


@everywhere("GRPO with LoRA, two log-prob calls")
def test_lora(there: There) -> None:
    variant = there.collector("lora", GRPO, *LORA, **EVERYTHING)
    assert Tree(variant.dump).stages().keys() == FOUR
    assert heads(variant, stages.LOG_PROB) == heads(variant, stages.REFERENCE) == 4


@everywhere("two ranks")
def test_two_ranks(there: There) -> None:
    variant = there.collector("two-ranks", "trainer.n_gpus_per_node=2", **EVERYTHING)
    for stage in SIX - {stages.GENERATE}:
        for rank in (0, 1):
            assert Tree(variant.dump).records(stage, rank=rank), (stage, rank)
    assert heads(variant, stages.LOG_PROB, rank=1) == 2


@everywhere("under Ray, everything switched on: from 0.9 on the numbers of the run without")
def test_under_ray(there: There) -> None:
    further = _FURTHER.get(there.environment.version, ())
    dump = there.under_ray("ray", *further, token_range_end=1).scratch / "dump"
    assert Tree(dump).stages() == {stage: {"step0"} for stage in SIX}
    recorded = {sample.sample_digest for sample in hdf5.read(dump / "rollouts/step0.h5").samples}
    assert {row.sample for row in key_data(dump).rows("old_log_probs", 0)} == recorded
    if there.environment.version == "0.8.0":
        return  # which has no seed of the engine's: it samples other tokens in another process
    alone = there.everything().dump
    for name in ("responses", "old_log_probs", "ref_log_prob", "values", "advantages"):
        one, other = (Tree(tree).key(name) for tree in (dump, alone))
        assert [a.tobytes() for a in one] == [a.tobytes() for a in other], name


@everywhere("V1 (TransferQueue) under Ray, PPO with a critic", WITH_V1)
def test_v1(there: There) -> None:
    variant = there.under_ray("v1", "trainer.use_v1=true")
    dump = variant.scratch / "dump"
    assert Tree(dump).stages() == {stage: {"step0"} for stage in SIX}
    recorded = {sample.sample_digest for sample in hdf5.read(dump / "rollouts/step0.h5").samples}
    assert len(recorded) == 8
    for name in ("old_log_probs", "values"):
        assert {row.sample for row in key_data(dump).rows(name, 0)} == recorded, name
