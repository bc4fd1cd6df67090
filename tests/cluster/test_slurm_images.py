"""Does an alignment run on a real Slurm with every job in its image?

The runs' image holds a framework and is minutes in the building: ``make cluster`` asks this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import polars
import pytest

if TYPE_CHECKING:
    from conftest import Aligned

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]


def test_the_runs_really_happened_in_the_image(aligned_in_images: Aligned) -> None:
    key = aligned_in_images.site.key(aligned_in_images.config, "benchmark")
    run = aligned_in_images.store / "runs" / key
    environment = json.loads((run / "environment.json").read_text())
    # Debian's Python of the image, not the one that runs these tests.
    assert "3.11.2" in json.dumps(environment)


def test_msprobe_s_table_was_written_in_the_image_with_torch(aligned_in_images: Aligned) -> None:
    tables = sorted((aligned_in_images.results / "compare/target").glob("*/official.csv"))
    assert len(tables) == 5


def test_the_repeat_in_the_image_is_bitwise_the_benchmark(aligned_in_images: Aligned) -> None:
    aligned_in_images.assert_the_repeat_is_bitwise_the_benchmark()


def test_locally_in_the_same_image_the_numbers_are_the_same(
    aligned_in_images: Aligned, tmp_path: Path
) -> None:
    """One benchmark run without Slurm has the key and the records of the one on the cluster.

    Of a target's run test_two_sites shows the same every time.
    """
    done = aligned_in_images.site.command(
        *("rlprobe", "run", "--config", aligned_in_images.config, "--role", "benchmark"),
        *("--store", str(tmp_path / "store")),
    )
    assert done.returncode == 0, done.stdout
    key = aligned_in_images.site.key(aligned_in_images.config, "benchmark")
    stages = sorted((aligned_in_images.store / "runs" / key / "records").glob("*.parquet"))
    assert len(stages) == 6
    for there in stages:
        here = tmp_path / "store" / "runs" / key / "records" / there.name
        if there.stem == "actor_generate_sequences":
            # requests are answered, and so their calls are counted, in the order they arrive
            numbers = ["step", "rank", "mean", "norm"]
            one, other = (
                polars.read_parquet(path, columns=numbers).sort(numbers) for path in (here, there)
            )
        else:
            columns = ["step", "rank", "order", "name", "mean", "norm", "digest"]
            one, other = (polars.read_parquet(path, columns=columns) for path in (here, there))
        assert one.equals(other), there.name
