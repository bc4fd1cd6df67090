"""Do processes that use one store at the same time lose nothing of each other's?"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rlprobe.store.read import keys
from rlprobe.store.verify import verify
from tests.soak.conftest import MINUTES
from tests.soak.world import World

_WORKER = """
import json, random, sys, time
from pathlib import Path
from rlprobe.errors import RlprobeError
from rlprobe.store.alignments import record_alignment
from rlprobe.store.commit import commit
from rlprobe.store.exporting import export
from rlprobe.store.gc import collect, remove
from rlprobe.store.importing import import_bundle
from rlprobe.store.verify import verify

job = json.loads(sys.argv[1])
store, chance = Path(job["store"]), random.Random(job["seed"])
end = time.monotonic() + job["seconds"]
target = store.parent / f"out-{job['seed']}.rlprobe"
print("ready", flush=True)
while time.monotonic() < end:
    what = chance.choice(["commit", "commit", "import", "replace", "gc", "export", "verify", "rm"])
    try:
        if what == "commit":
            commit(Path(job[chance.choice(["old", "new"])]), store, job["key"], job["declared"])
        elif what == "import":
            import_bundle(store, Path(job["all"]), replace=True)
        elif what == "replace":
            import_bundle(store, Path(job["replacement"]), replace=True)
        elif what == "gc":
            collect(store, wait=0.2)
        elif what == "export":
            target.unlink(missing_ok=True)
            export(store, job["kept"], target)
        elif what == "verify":
            verify(store, job["kept"][:1])
        else:
            remove(store, job["key"], force=True)
        print("done", what, flush=True)
    except RlprobeError as error:
        print("refused", what, str(error)[:200].replace(chr(10), " "), flush=True)
"""


def test_a_crowd_on_one_store_loses_nothing(
    world: World, chance: random.Random, memory: Path, figures: Counter[str]
) -> None:
    place = world.copy(memory / "crowd", results=False)
    store = place / "store"
    kept = [key for key in world.kept if key != world.key]
    seconds = 60 * MINUTES * 0.2 if MINUTES else 3.0
    started = [_start(world, place, kept, seconds, number) for number in range(4)]
    end = time.monotonic() + seconds
    killed = 0
    while time.monotonic() < end:  # one of them is killed from time to time, and comes again
        time.sleep(min(2.0, seconds / 4))
        victim = chance.randrange(len(started))
        started[victim].send_signal(signal.SIGKILL)
        _told(started[victim], figures)
        killed += 1
        left = max(1.0, end - time.monotonic())
        started[victim] = _start(world, place, kept, left, 100 + killed)
    for process in started:
        _told(process, figures)
        assert process.returncode == 0
    figures["kills: one of a crowd"] += killed
    assert verify(store).problems == []
    assert set(kept) <= set(keys(store))
    assert json.loads((store / "alignments" / "a.json").read_text())["keys"] == sorted(kept)


def _start(
    world: World, place: Path, kept: list[str], seconds: float, seed: int
) -> subprocess.Popen[str]:
    job = {
        **world.job(world.old, place), "old": str(world.old), "new": str(world.new),
        "all": str(world.bundle("all")), "replacement": str(world.bundle("replacement")),
        "kept": kept, "seconds": seconds, "seed": seed,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER, json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def _told(process: subprocess.Popen[str], figures: Counter[str]) -> None:
    said = process.communicate(timeout=120)[0]
    figures["tracebacks"] += "Traceback" in said
    assert "Traceback" not in said, said
    for line in said.splitlines():
        how, _, rest = line.partition(" ")
        if how in ("done", "refused"):
            figures[f"crowd: {rest.split()[0]} {how}"] += 1
