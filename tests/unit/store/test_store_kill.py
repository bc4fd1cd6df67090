"""Is a run whole or absent, whenever whoever commits it is killed?

A child process counts the file system calls of a commit and kills itself with SIGKILL at the N-th,
for every N there is; production code has no hook for it.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlprobe.store.commit import commit
from rlprobe.store.keys import run_key
from rlprobe.store.read import keys
from rlprobe.store.verify import verify

DECLARED = {"role": "benchmark", "seed": 1}
KEY = run_key(DECLARED)

#: Forks a child per kill from one warm interpreter, so that a kill costs no imports.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
from rlprobe.store.commit import commit

calls = ("link", "rename", "replace", "fsync", "mkdir", "chmod", "unlink", "rmdir")

def child(job):
    seen = 0
    def counted(name, real):
        def call(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == job["at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(os, name, call)
    for name in calls:
        counted(name, getattr(os, name))
    commit(Path(job["scratch"]), Path(job["store"]), job["key"], job["declared"])
    return seen

for line in sys.stdin:
    job = json.loads(line)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(child(job)).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    said = os.read(reader, 10000).decode()
    os.close(reader)
    print(json.dumps({"killed": os.WIFSIGNALED(status), "said": said}), flush=True)
"""


class Driver:
    """Commits in child processes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def commit(self, scratch: Path, store: Path, at: int = 0) -> dict[str, object]:
        job = {
            "scratch": str(scratch),
            "store": str(store),
            "at": at,
            "key": KEY,
            "declared": DECLARED,
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture
def driver():
    driver = Driver()
    yield driver
    driver.close()


def assert_whole_or_absent(store: Path) -> None:
    if not store.is_dir() or not any(store.iterdir()):
        return  # killed before it had begun: an empty directory is not a store to be verified
    assert verify(store).problems == []
    left = store / "runs" / KEY
    assert KEY in keys(store) or not left.exists() or not any(left.iterdir())


@pytest.mark.slow
def test_killed_at_any_call_a_commit_leaves_the_run_whole_or_absent_and_a_rerun_completes_it(
    memory, make_scratch, driver
):
    place = make_scratch(memory / "scratch", stages=("actor_update",), rollouts=False)
    (memory / "reference").mkdir()
    whole = driver.commit(place, memory / "reference")
    total = int(str(whole["said"]))
    reference = (memory / "reference" / "runs" / KEY / "manifest.json").read_bytes()
    assert total > 60
    appeared = 0
    # Every fifth call, and every one around the rename that shows the run.
    for at in sorted({*range(1, total, 5), *range(total - 30, total + 1)}):
        store = memory / "store"
        store.mkdir()
        assert driver.commit(place, store, at)["killed"], at
        assert_whole_or_absent(store)
        appeared += KEY in keys(store)
        again = driver.commit(place, store)
        assert not again["killed"] and str(again["said"]).isdigit(), (at, again)
        assert (store / "runs" / KEY / "manifest.json").read_bytes() == reference
        assert verify(store).problems == []
        assert not any((store / "tmp").iterdir()), "what the killed commit left is swept"
        shutil.rmtree(store)
    # Only the last few calls come after the rename that shows the run.
    assert 0 < appeared < 15


@pytest.mark.slow
def test_killed_while_it_replaces_a_run_a_commit_never_shows_a_mixture(
    memory, make_scratch, driver
):
    old = make_scratch(memory / "old", stages=("actor_update",))
    new = make_scratch(memory / "new", stages=("actor_update",), seed=5)
    probe = memory / "probe"
    driver.commit(old, probe)
    total = int(str(driver.commit(new, probe)["said"]))
    for at in range(total - 25, total + 1):
        store = memory / f"store-{at}"
        driver.commit(old, store)
        assert driver.commit(new, store, at)["killed"], at
        assert_whole_or_absent(store)
        driver.commit(new, store)
        assert (store / "runs" / KEY / "manifest.json").read_bytes() == (
            probe / "runs" / KEY / "manifest.json"
        ).read_bytes()


def test_a_commit_killed_by_the_clock_leaves_the_run_whole_or_absent(memory, make_scratch):
    place = make_scratch(memory / "scratch", steps=2, ranks=2)
    where = f"Path({str(place)!r}), Path({str(memory / 'store')!r})"
    code = (
        "from pathlib import Path; from rlprobe.store.commit import commit\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        f"    commit({where}, {KEY!r}, {DECLARED!r})"
    )
    for delay in (0.05, 0.21, 0.4):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert_whole_or_absent(memory / "store")
    commit(place, memory / "store", KEY, DECLARED)
    assert verify(memory / "store").problems == []
    assert not any((memory / "store" / "tmp").iterdir())
