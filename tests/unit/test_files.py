"""Is a file there whole or not at all, and does a lock say who holds it?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlprobe import files
from rlprobe.claims import Holder, claimed
from rlprobe.files import InUseError


def test_what_fails_half_way_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail() -> None:
        with files.written(path) as temporary:
            temporary.write_text("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_and_its_directory_made(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "deep" / "a.json"
    for text in ("one", "two"):
        files.replace_text(path, text, durable=durable)
        assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_file_that_changed_is_digested_anew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    first = files.seen_digest(path)
    path.write_bytes(b"two")
    assert files.seen_digest(path) != first
    other = path.with_name("b")
    other.write_bytes(b"one")
    other.replace(path)
    assert files.seen_digest(path) == first


def test_a_lock_is_held_by_one_and_free_when_its_process_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys, rlprobe.files as f; h = open(sys.argv[1], 'a'); f.hold(h.fileno()); "
        "print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    told = []
    with path.open("a") as handle:
        with pytest.raises(InUseError):
            files.hold(handle.fileno(), wait=0.3, waiting=lambda: told.append(1))
        assert told == [1]
        process.kill()
        process.wait()
        assert files.hold(handle.fileno(), wait=5)


def test_a_claim_of_the_dead_is_taken_over_and_that_of_the_living_or_unknown_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "claim"
    me = Holder.me()
    assert not me.is_dead()
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    for holder, dead in (
        (me._replace(began=me.began + 1), True),  # the number came again
        (me._replace(pid=process.pid), True),
        (me._replace(boot="another start of the machine"), True),
        (me._replace(host="elsewhere"), False),
        (me._replace(host="elsewhere", boot="another"), False),
        (me._replace(namespace="pid:[1]", pid=process.pid), False),  # a container's process
        (me, False),
    ):
        assert holder.is_dead() == dead, holder
        path.write_bytes(holder.to_bytes())
        if dead:
            with claimed(path):
                assert Holder.read(path) == me
            assert not path.exists()
        else:
            with pytest.raises(InUseError, match="remove the file"), claimed(path):
                pass
            assert Holder.read(path) == holder
    path.write_text("{}")
    with pytest.raises(InUseError, match="an unknown process"), claimed(path):
        pass


def test_a_claim_is_exclusive_between_processes(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib, rlprobe.claims as c, rlprobe.files as f\n"
        "p = pathlib.Path(sys.argv[1]); n = 0\n"
        "for _ in range(60):\n"
        "    try:\n"
        "        with c.claimed(p):\n"
        "            (p.parent / 'in').mkdir(); n += 1; (p.parent / 'in').rmdir()\n"
        "    except f.InUseError: time.sleep(0.001)\n"
        "print(n)"
    )
    path = tmp_path / "claim"
    path.write_bytes(Holder.me()._replace(began=1).to_bytes())  # of the dead: all want it at once
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    counts = [int(process.communicate(timeout=60)[0]) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0] and sum(counts) > 0
    assert list(tmp_path.iterdir()) == []
