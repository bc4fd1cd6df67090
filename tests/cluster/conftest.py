"""One Slurm, one set of images and one aligned pair for all cluster tests of a session.

Whatever is missing on a Debian machine is installed; where that cannot be, the tests are skipped
and say why. RLPROBE_TEST_CACHE keeps images between sessions.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from services import apptainer, images, slurm

ROOT = Path(__file__).resolve().parents[2]
#: Snakemake asks Slurm this soon; a cluster's profile waits longer.
_IMPATIENT = ("--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "20")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """A running Slurm with hosts gpu01, npu01, npu02 and cpu01."""
    slurm.install()
    reason = slurm.why_not()
    if reason is not None:
        pytest.skip(f"no Slurm on this machine: {reason}")
    with slurm.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="session")
def image() -> Callable[[str], Path]:
    """An image by name, really built; the SIF."""
    reason = images.why_not()
    if reason is not None:
        pytest.skip(f"no images on this machine: {reason}")
    return images.build


@dataclasses.dataclass
class Site:
    """A working directory on the cluster, with the project's workflow and a store of its own."""

    directory: Path
    cluster: slurm.Slurm | None
    raw: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in ("Snakefile", "workflow", "profiles", "config", "requirements"):
            (self.directory / name).symlink_to(ROOT / name)
        (self.directory / "ascend_cluster").symlink_to("profiles/ascend_cluster")
        self.raw = yaml.safe_load((ROOT / "config/config.yaml").read_text())
        self.raw |= {"steps": {"total": 1, "start": 0, "end": 0}, "ray": True}

    @property
    def environment(self) -> dict[str, str]:
        path = [str(Path(sys.executable).parent), os.environ["PATH"]]
        if apptainer.why_not() is None:
            path.insert(1, str(apptainer.directory()))
        environment = dict(os.environ) if self.cluster is None else self.cluster.environ()
        return {**environment, "PATH": ":".join(path)}

    def write(self, name: str, **changes: Any) -> str:
        """Write the default alignment with changes; sections are merged."""
        raw = copy.deepcopy(self.raw)
        for key, value in changes.items():
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
        raw["name"] = name
        (self.directory / f"{name}.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
        return f"{name}.yaml"

    def command(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command here; stdout and stderr together in ``stdout``."""
        return subprocess.run(
            words,
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **options,
        )

    def snakemake(self, config: str, *words: str) -> list[str]:
        return [
            *("snakemake", "--profile", "ascend_cluster", "--configfile", config),
            *_IMPATIENT,
            *words,
        ]

    def key(self, config: str, role: str) -> str:
        """Key of a role's run, as the project itself computes it."""
        done = subprocess.run(
            ["rlprobe", "config", "check", config, "--json", "keys.json"],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.returncode == 0
        found = json.loads((self.directory / "keys.json").read_text())
        return str(found["runs"][role]["key"])


@dataclasses.dataclass(frozen=True)
class Aligned:
    """The default alignment, run on Slurm."""

    site: Site
    config: str
    output: str
    #: What Slurm itself says of the jobs, one line each.
    jobs: list[str]

    @property
    def results(self) -> Path:
        return self.site.directory / "results" / Path(self.config).stem

    @property
    def store(self) -> Path:
        return self.site.directory / "store"

    def assert_the_repeat_is_bitwise_the_benchmark(self) -> None:
        summaries = list((self.results / "compare/repeat").glob("*/summary.json"))
        assert summaries
        for path in summaries:
            summary = json.loads(path.read_text())
            alike = summary["identical"] + summary["no_difference_seen"]
            assert alike == summary["compared"] > 0, path


def _align(site: Site, name: str, side: dict[str, Any], analysis: dict[str, Any]) -> Aligned:
    """Benchmark on the GPU partition, target on the NPU partition, the rest on CPU nodes."""
    run: dict[str, Any] = {"cpus": 2, "memory": "6G", "time": "20m"}
    gpu = {"partition": "gpu", "gres": "gpu:1", "constraint": "h200", **run}
    npu = {"partition": "npu", "gres": "npu:8", **run}
    cpu = {"partition": "cpu", "cpus": 1, "memory": "2G", "time": "10m"}
    config = site.write(
        name,
        benchmark={**side, "resources": gpu},
        target={**side, "resources": npu},
        analysis={**analysis, "resources": cpu},
    )
    done = site.command(*site.snakemake(config))
    shown = site.command("scontrol", "--oneliner", "--details", "show", "jobs").stdout
    assert done.returncode == 0, done.stdout
    return Aligned(site, config, done.stdout, shown.splitlines())


@pytest.fixture(scope="session")
def aligned(
    tmp_path_factory: pytest.TempPathFactory,
    cluster: slurm.Slurm,
    image: Callable[[str], Path],
) -> Aligned:
    """Runs from the nodes' environment, everything after them in its image."""
    analysis = {"image": str(image("compare")), "official_table": False}
    site = Site(tmp_path_factory.mktemp("aligned"), cluster)
    return _align(site, "on-slurm", {}, analysis)


@pytest.fixture(scope="session")
def aligned_in_images(
    tmp_path_factory: pytest.TempPathFactory,
    cluster: slurm.Slurm,
    image: Callable[[str], Path],
) -> Aligned:
    """Every job in its image; msprobe's own table in the one that has torch."""
    verl = str(image("verl-cpu"))
    side = {"lock": None, "container": {"runtime": "apptainer", "image": verl}}
    analysis = {"image": str(image("compare")), "torch_image": verl}
    site = Site(tmp_path_factory.mktemp("aligned-in-images"), cluster)
    return _align(site, "in-images", side, analysis)


@pytest.fixture(scope="session")
def site_at(cluster: slurm.Slurm) -> Callable[[Path], Site]:
    """Makes working directories on the cluster, for more than one test."""
    return lambda directory: Site(directory, cluster)


@pytest.fixture
def site_in(tmp_path: Path, cluster: slurm.Slurm) -> Callable[[str], Site]:
    """Makes working directories on the cluster, by name."""
    return lambda name: Site(tmp_path / name, cluster)


@pytest.fixture
def site(site_in: Callable[[str], Site]) -> Site:
    return site_in("site")


@pytest.fixture(scope="module")
def site_without(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Site]:
    """Makes working directories without a cluster, for more than one test."""
    return lambda name: Site(tmp_path_factory.mktemp(name), None)


@pytest.fixture
def lonely_site(tmp_path: Path) -> Callable[[str], Site]:
    """Makes working directories that no cluster and no other site can see."""
    return lambda name: Site(tmp_path / name, None)
