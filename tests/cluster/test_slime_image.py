"""Does slime run in an image of its own, record there, replay there, and is it judged?

The image is the stand-in's (``tests/slime/standin/README.md``), built and entered as slime's own
would be: framework and Megatron are in it, and what the host has of them is not used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from services import images

from rlprobe.capture import code

if TYPE_CHECKING:
    from conftest import Site

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    # tests/slime has the same without an image: make cluster
    pytest.mark.long,
    pytest.mark.timeout(1800),
]
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Aligned:
    site: Site
    results: Path

    @property
    def diagnosis(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / "diagnosis.json").read_text())
        return found


@pytest.fixture(scope="module")
def aligned(site_without: Callable[[str], Site]) -> Aligned:
    """The example for a CPU, each run in the image; the target as another version of slime."""
    reason = images.why_not()
    if reason is not None:
        pytest.skip(f"no images on this machine: {reason}")
    container = {"runtime": "apptainer", "image": str(images.build("slime-cpu"))}
    site = site_without("slime-in-image")
    raw = yaml.safe_load((ROOT / "config/examples/slime_cpu.yaml").read_text())
    raw["model"]["path"] = str(ROOT / raw["model"]["path"])
    raw["data"]["train_files"] = str(ROOT / raw["data"]["train_files"])
    site.raw = raw
    changes = {"lock": None, "container": container}
    # the image knows where its slime is
    environments = [dict(raw[side]["environment"]) for side in ("benchmark", "target")]
    for environment in environments:
        environment.pop("RLPROBE_SLIME")
    config = site.write(
        "slime-in-image",
        benchmark={**changes, "environment": environments[0]},
        target={**changes, "environment": environments[1]},
        analysis={"official_table": False},
    )
    done = site.command("snakemake", "--profile", "profiles/local", "--configfile", config)
    assert done.returncode == 0, done.stdout
    return Aligned(site, site.directory / "results/slime-in-image")


def test_slime_in_its_image_is_recorded_replayed_and_judged(aligned: Aligned) -> None:
    found = aligned.diagnosis
    assert found["verdict"] == "aligned", found["sentence"]
    judged = {stage["stage"] for stage in found["stages"] if stage["records"]}
    assert judged >= {"reference_compute_log_prob", "actor_compute_log_prob", "actor_update"}


@pytest.mark.parametrize("role", ["benchmark", "target"])
def test_both_runs_happened_in_the_image(aligned: Aligned, role: str) -> None:
    key = aligned.site.key("slime-in-image.yaml", role)
    run = aligned.site.directory / "store/runs" / key
    processes = json.loads((run / "environment.json").read_text())["processes"]
    # Debian's Python of the image, and the slime that the image has: none is named, or is here
    assert {process["python"] for process in processes.values()} == {"3.11.2"}
    slime = {process["code"]["slime"] for process in processes.values()}
    assert slime == {code.digest(ROOT / "tests/slime/standin/slime")}
    assert "RLPROBE_SLIME" not in json.loads((run / "manifest.json").read_text())["declared"].get(
        "environment", {}
    )
