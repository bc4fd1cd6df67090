"""Two alignments on one node: does either ever touch the other?"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.leftovers import processes_of, within

if TYPE_CHECKING:
    from conftest import Site

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]


@contextlib.contextmanager
def collecting(site: Site, config: str) -> Iterator[subprocess.Popen[bytes]]:
    """``snakemake collect`` on Slurm, in the background."""
    with (site.directory / "output").open("wb") as output:
        process = subprocess.Popen(
            [*site.snakemake(config), "collect"],
            cwd=site.directory,
            env=site.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A shell that started these tests in the background made them deaf to ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.long
def test_ctrl_c_ends_one_run_with_all_it_started_and_its_neighbour_commits(
    site_in: Callable[[str], Site],
) -> None:
    kept, ended = site_in("kept"), site_in("ended")
    node = {"resources": {"partition": "gpu", "gres": "gpu:1", "memory": "4G"}}
    step = {"total": 1, "start": 0, "end": 0}
    configs = [
        site.write(name, seed=seed, steps=step, benchmark=node, controls={"repeat": False})
        for site, name, seed in ((kept, "kept", 1), (ended, "ended", 2))
    ]
    with collecting(kept, configs[0]) as neighbour, collecting(ended, configs[1]) as cancelled:
        log = ended.directory / "logs/ended/benchmark.log"
        within(300, lambda: log.exists() and "ray" in log.read_text(errors="replace").lower())
        assert cancelled.poll() is None
        cancelled.send_signal(signal.SIGINT)
        assert cancelled.wait(120) != 0
        within(60, lambda: str(ended.directory) not in queue(ended))
        within(60, lambda: not processes_of(ended.directory))
        assert not list((ended.directory / "store/runs").glob("*/manifest.json"))
        assert neighbour.wait(600) == 0, (kept.directory / "output").read_text()
    key = kept.key(configs[0], "benchmark")
    assert (kept.directory / "store/runs" / key / "manifest.json").exists()
    assert not list(Path("/tmp").glob("rlprobe-[0-9]*")), "directories of a job are left"


def queue(site: Site) -> str:
    return site.command("squeue", "--noheader", "--format=%Z").stdout
