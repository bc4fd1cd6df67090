"""Can a site align its device with runs that it knows from a file only?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import polars
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Aligned, Site

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_one_file_carries_the_benchmark_to_a_site_that_never_saw_it(
    aligned: Aligned, lonely_site: Callable[[str], Site], tmp_path: Path
) -> None:
    there = aligned.site
    keys = [there.key(aligned.config, role) for role in ("benchmark", "repeat")]
    bundle = tmp_path / "handover.rlprobe"
    exported = there.command(
        "rlprobe", "store", "export", "--store", "store", *keys, "-o", str(bundle)
    )
    assert exported.returncode == 0, exported.stdout
    digest = next(
        line for line in exported.stdout.splitlines() if line.startswith("sha256:")
    ).strip()

    here = lonely_site("npu-site")
    carried = shutil.copy(bundle, here.directory)
    imported = here.command(
        *("rlprobe", "store", "import", "--store", "store", str(carried), "--digest", digest)
    )
    assert imported.returncode == 0, imported.stdout
    config = here.write(
        "handed-over",
        benchmark={"run": keys[0]},
        controls={"repeat": keys[1]},
        analysis={"official_table": False},
    )
    done = here.command("snakemake", "--profile", "profiles/local", "--configfile", config)
    assert done.returncode == 0, done.stdout
    assert "run_benchmark" not in done.stdout
    assert "run_repeat" not in done.stdout
    diagnosis = json.loads((here.directory / "results/handed-over/diagnosis.json").read_text())
    assert diagnosis["verdict"] == "aligned", diagnosis["sentence"]
    # Without Slurm the run has the key and the records of the cluster's.
    key = there.key(aligned.config, "target")
    elsewhere = sorted((aligned.store / "runs" / key / "records").glob("*.parquet"))
    assert len(elsewhere) == 5
    columns = ["step", "rank", "order", "name", "mean", "norm", "digest"]
    for path in elsewhere:
        here_too = here.directory / "store" / "runs" / key / "records" / path.name
        one, other = (polars.read_parquet(p, columns=columns) for p in (here_too, path))
        assert one.equals(other), path.name
    # What the other site found from the same benchmark is found here, record by record.
    found = json.loads((aligned.results / "diagnosis.json").read_text())
    assert diagnosis["coverage"] == found["coverage"]
    assert [s["beyond"] for s in diagnosis["stages"]] == [s["beyond"] for s in found["stages"]]
