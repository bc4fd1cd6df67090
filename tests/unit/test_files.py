"""Is a file there whole or not at all, and does a lock say who holds it?"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def test_threads_that_ask_at_once_read_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "table", []
    path.write_bytes(b"table")
    found, begun = files.digest(path), threading.Event()

    def slowly(path: Path) -> files.Digest:
        read.append(path)
        assert begun.wait(10)
        return found

    monkeypatch.setattr(files, "digest", slowly)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(files.seen_digest, path) for _ in range(3)]
        begun.set()
        assert {one.result() for one in asked} == {found}
    assert read == [path]


def test_a_file_that_could_not_be_read_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table"
    path.write_bytes(b"table")
    with monkeypatch.context() as patched:
        patched.setattr(files, "digest", lambda path: path.read_text(encoding="no such"))
        with pytest.raises(LookupError):
            files.seen_digest(path)
    assert files.seen_digest(path) == files.digest(path)


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


_WRITER = """
import sys, pathlib, rlprobe.files as f
with f.written(pathlib.Path(sys.argv[1])) as place:
    place.write_text("half")
    print(place.name, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process in the middle of writing a file, and the name that it writes to."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()


@pytest.mark.parametrize("name", ["a.json", "records.parquet", "no ending", ".hidden.tmp"])
def test_the_next_writer_clears_what_a_killed_one_left(tmp_path: Path, name: str) -> None:
    with writing(tmp_path / name) as (process, temporary):
        process.kill()
        process.wait()
        assert [path.name for path in tmp_path.iterdir()] == [temporary]
        files.replace_text(tmp_path / "another.html", "x")
        assert [path.name for path in tmp_path.iterdir()] == ["another.html"]


def test_what_a_living_writer_has_begun_is_left_to_it(tmp_path: Path) -> None:
    with writing(tmp_path / "a.json") as (process, temporary):
        files.replace_text(tmp_path / "b.json", "x")
        files.sweep(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {temporary, "b.json"}
        process.communicate("", timeout=60)
    assert (tmp_path / "a.json").read_text() == "half"
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json"}


def test_a_writer_of_this_process_is_a_living_one(tmp_path: Path) -> None:
    with files.written(tmp_path / "a") as first, files.written(tmp_path / "a") as second:
        assert first.exists() and second.exists() and first != second
        first.write_text("1")
        second.write_text("2")
    assert (tmp_path / "a").read_text() == "1"


@pytest.mark.parametrize("name", [".a.1234-0123abcd.tmp.json", ".a.w1.tmp", "a.w1-0123abcd.tmp"])
def test_other_files_are_nobodys_to_clear(tmp_path: Path, name: str) -> None:
    """Such as those of earlier versions, which held no lock on what they wrote."""
    (tmp_path / name).write_text("x")
    files.sweep(tmp_path)
    assert (tmp_path / name).exists()


def test_without_locks_nothing_is_known_and_nothing_removed(tmp_path: Path, monkeypatch) -> None:
    with writing(tmp_path / "a.json") as (process, temporary):
        process.kill()
        process.wait()
        with monkeypatch.context() as broken:
            refusal = OSError(errno.ENOLCK, "No locks available")
            broken.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(refusal))
            files.replace_text(tmp_path / "b.json", "x")
            assert {path.name for path in tmp_path.iterdir()} == {temporary, "b.json"}
        files.sweep(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


def test_one_who_sweeps_between_making_a_file_and_holding_it(tmp_path: Path, monkeypatch) -> None:
    real = files.hold
    swept: list[int] = []

    def late(descriptor: int, **more: object) -> bool:
        if not swept:
            swept.append(descriptor)
            files.sweep(tmp_path)
        return real(descriptor, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "hold", late)
    files.replace_text(tmp_path / "a", "whole")
    assert swept and [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "whole"


@pytest.mark.parametrize("blocks", [[], [b"one"], [b"x" * (3 << 20), b"y"], [b"z"] * 50])
def test_a_file_is_digested_beside_its_writer(tmp_path: Path, blocks: list[bytes]) -> None:
    """Also what stays in the writer's buffer until the file is closed."""
    path = tmp_path / "table"
    with files.Followed(path) as followed, path.open("wb") as file:
        for block in blocks:
            file.write(block)
            time.sleep(0.001)
    assert followed.digest == files.digest(path)


@pytest.mark.parametrize(
    "error", [OSError("disk full"), ValueError("no table"), KeyboardInterrupt()]
)
def test_what_ends_the_writer_ends_who_follows_it(tmp_path: Path, error: BaseException) -> None:
    before = threading.active_count()
    with (
        pytest.raises(type(error)),
        files.Followed(tmp_path / "table"),
        (tmp_path / "table").open("wb") as file,
    ):
        file.write(b"half")
        raise error
    assert threading.active_count() == before


def test_a_file_that_cannot_be_followed_is_said(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.mkdir()
    with pytest.raises(OSError, match="Is a directory"), files.Followed(path):
        pass
