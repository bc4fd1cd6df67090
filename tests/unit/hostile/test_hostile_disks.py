"""Is a full, broken or forbidden disk one sentence, for every command, with nothing half-written?

Real file systems where the kernel makes the failure (a tmpfs that is full or has no more inodes, or
is mounted read-only), and failing calls where it cannot be had otherwise.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

from rlprobe import disk
from rlprobe.cli import COMMANDS, main
from rlprobe.files import written
from rlprobe.store.verify import verify
from tests.unit.hostile.conftest import Aligned, Told, files

pytestmark = pytest.mark.slow

#: The command line that writes to ``disk/``, by command and action. Paths: those of ``aligned``.
WRITING: dict[str, Callable[[Aligned], list[str]]] = {
    "run": lambda a: ["run", "--config", "a.yaml", "--role", "benchmark", "--store", "disk/store"],
    "compare": lambda a: ["compare", *_runs(a), "-o", "disk/out"],
    "official-table": lambda a: ["official-table", *_runs(a), "-o", "disk/out"],
    "official-key-data": lambda a: ["official-key-data", *_runs(a), "-o", "disk/out"],
    "refine": lambda a: ["refine", "--config", "b.yaml", "--part", "suspects"],
    "diagnose": lambda a: ["diagnose", "disk/results/a", "--no-fail"],
    "report": lambda a: ["report", "disk/results/a"],
    "curves": lambda a: _curves(),
    "verdict": lambda a: ["verdict", str(a.results), "--json", "disk/out.json"],
    "rollouts show": lambda a: [
        *("rollouts", "show", f"{a.run('benchmark')}/rollouts/step0.h5"),
        *("--json", "disk/out.json"),
    ],
    "doctor": lambda a: ["doctor", "--config", "a.yaml", "--json", "disk/out.json"],
    "estimate": lambda a: ["estimate", "--config", "a.yaml", "--json", "disk/out.json"],
    "selftest": lambda a: ["selftest", "--quick", "--only", "rms_eps", "--directory", "disk/self"],
    "config check": lambda a: ["config", "check", "a.yaml", "--json", "disk/out.json"],
    "config plan": lambda a: ["config", "plan", "b.yaml"],
    "store ls": lambda a: ["store", "ls", "--store", "store", "--json", "disk/out.json"],
    "store show": lambda a: [
        *("store", "show", a.jobs.runs["target"].key, "--store", "store"),
        *("--json", "disk/out.json"),
    ],
    "store verify": lambda a: ["store", "verify", "--store", "store", "--json", "disk/out.json"],
    "store export": lambda a: [
        *("store", "export", a.jobs.runs["target"].key, "--store", "store"),
        *("-o", "disk/out.bundle"),
    ],
    "store import": lambda a: ["store", "import", "a.bundle", "--store", "disk/store"],
    "store tree": lambda a: [
        *("store", "tree", a.jobs.runs["target"].key, "disk/tree", "--copy", "--store", "store"),
    ],
}


def _curves() -> list[str]:
    """Four trainings of two steps, as verl's own logger writes them."""
    names = []
    for run in range(4):
        steps = [{"step": n, "data": {"actor/loss": 1 + run / 100 / n}} for n in (1, 2)]
        names.append(f"trained{run}.jsonl")
        Path(names[-1]).write_text("".join(json.dumps(step) + "\n" for step in steps))
    first, second, *others = names
    return ["curves", first, second, "--perturbed", *others, "--json", "disk/out.json"]


def _runs(aligned: Aligned) -> list[str]:
    return [str(aligned.run("benchmark")), str(aligned.run("target"))]


def test_every_command_that_writes_is_here() -> None:
    # exec and enter write nothing: they become the command that they are given; reproduce needs an
    # alignment that was refined, and has a test of its own (test_refine_reproduce.py)
    elsewhere = {"enter", "exec", "reproduce"}
    assert {name.partition(" ")[0] for name in WRITING} == COMMANDS.keys() - elsewhere


@pytest.fixture
def small(aligned: Aligned) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with these options at ``disk/``, the results of the alignment on it."""
    place = aligned.directory / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=False,
            capture_output=True,
        )  # fmt: skip
        if done.returncode:
            pytest.skip("no file system can be mounted here")
        shutil.copytree(aligned.results, place / "results/a")
        text = Path("a.yaml").read_text().replace("results: results", "results: disk/results")
        assert "disk/results" in text
        Path("b.yaml").write_text(text)
        return place

    yield mount
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor starts no framework here: what it finds is test_doctor's, where it writes is ours."""
    monkeypatch.setattr("rlprobe.doctor.node.here", lambda alignment, key: iter(()))


def fill(place: Path) -> None:
    """Leave no byte."""
    with (place / "full").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def whole(place: Path) -> None:
    """Every file below a place can be read as what its name says, and none is left over."""
    for path in place.rglob("*"):
        assert ".tmp" not in path.name, path
        if path.is_file() and path.suffix == ".json":
            assert path.stat().st_size, path
            json.loads(path.read_bytes())
        elif path.is_file() and path.suffix == ".parquet":
            pl.read_parquet(path)
        elif path.is_file() and path.suffix == ".xlsx":
            assert zipfile.is_zipfile(path), path
        elif path.is_file() and path.suffix == ".csv":
            assert path.read_bytes().endswith(b"\n"), path


def check(aligned: Aligned, told: Told, name: str, reason: str) -> str:
    place = aligned.directory / "disk"
    before = files(place)
    said = told(*WRITING[name](aligned), code=(1,))
    assert "disk" in said
    assert reason in said
    # what was there is there still, and whatever came is whole
    assert before.items() <= files(place).items()
    whole(place)
    assert "out.json" not in files(place)
    assert "out.bundle" not in files(place)
    return said


@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk(name: str, aligned: Aligned, small, told: Told) -> None:
    place = small("size=4m")
    fill(place)
    assert "make room" in check(aligned, told, name, "No space left on device")


@pytest.mark.parametrize("name", WRITING)
def test_no_more_files(name: str, aligned: Aligned, small, told: Told) -> None:
    place = small("size=4m,nr_inodes=120")
    for number in range(200):
        try:
            (place / f"file{number}").touch()
        except OSError:
            break
    said = check(aligned, told, name, "No space left on device")
    assert "can hold no more than 120 files" in said


@pytest.mark.parametrize("name", WRITING)
def test_a_disk_that_is_mounted_read_only(name: str, aligned: Aligned, small, told: Told) -> None:
    place = small("size=4m")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    said = check(aligned, told, name, "Read-only file system")
    assert "mounted for writing" in said


FAILURES = {
    "a broken device": (errno.EIO, "ask whoever runs this storage"),
    "a quota": (errno.EDQUOT, "your quota there is used up"),
    "a lost file server": (errno.ESTALE, "mounted anew"),
    "a forbidden place": (errno.EACCES, "permissions changed"),
    "no more open files": (errno.EMFILE, "ulimit -n"),
}
#: Cheap ones that end in one whole file, and a bundle and a store.
SOME = ("compare", "diagnose", "report", "config check", "store export", "store import")


@pytest.mark.parametrize(("number", "advice"), FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("name", SOME)
def test_a_call_that_fails(
    name: str, call: str, number: int, advice: str, aligned: Aligned, told: Told, monkeypatch
) -> None:
    if (name, call) == ("store export", "replace"):
        call = "rename"
    shutil.copytree(aligned.results, "disk/results/a")
    text = Path("a.yaml").read_text().replace("results: results", "results: disk/results")
    Path("b.yaml").write_text(text)
    if call == "fsync" and name not in ("store export", "store import"):
        pytest.skip("what can be made again is not flushed")

    def fail(*args: object, **kwargs: object) -> None:
        # as the kernel says it: fsync knows no name
        raise OSError(number, os.strerror(number), *(args[:1] if call != "fsync" else ()))

    before = files(Path("disk"))
    # undone alone: the working directory is the fixture's to put back
    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        said = told(*WRITING[name](aligned), code=(1,))
    assert os.strerror(number) in said
    assert advice in said
    assert "disk" in said
    assert ".tmp" not in said
    assert before.items() <= files(Path("disk")).items()
    whole(Path("disk"))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP])
def test_links_that_are_refused_are_copies(number: int, aligned: Aligned, monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), *args[:1])

    monkeypatch.setattr(os, "link", refuse)
    assert main(["store", "import", "a.bundle", "--store", "other", "-q"]) == 0
    assert verify(Path("other")).problems == []


def test_a_clock_that_was_set_back(aligned: Aligned, monkeypatch) -> None:
    """The store is younger than now; nothing is taken for old, new or over."""
    monkeypatch.setattr(time, "time", lambda: 1.0)
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    runs = _runs(aligned)
    for words in (
        ["store", "import", "a.bundle", "--store", "other"],
        ["store", "verify", "--store", "other"],
        ["store", "verify", "--store", "store"],
        ["compare", *runs, "-o", "out"],
        ["diagnose", str(aligned.results), "--no-fail"],
        ["report", str(aligned.results)],
        ["store", "export", aligned.jobs.runs["target"].key, "--store", "store", "-o", "b.bundle"],
    ):
        assert main([*words, "-q"]) == 0, words


# ---------------------------------------------------------------------------------- the sentence


def test_what_fails_without_a_name_is_named_by_what_is_written(tmp_path: Path) -> None:
    named = pytest.raises(OSError, match=r"No space left.*: '.*out\.parquet'")
    with named, written(tmp_path / "out.parquet"):
        # as a library in Rust says it
        raise pl.exceptions.ComputeError("underlying IO error: nothing (os error 28)")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found, written(tmp_path / "out") as temporary:
        temporary.write_bytes((tmp_path / "input").read_bytes())
    assert str(found.value.filename).endswith("input")


def test_an_error_that_is_none_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError), written(tmp_path / "out"):
        raise KeyError("x")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        with written(tmp_path / "pipe") as place:
            place.write_text("x")
        assert reader.communicate()[0] == b"x"
    assert (tmp_path / "pipe").is_fifo()


def test_a_stdout_that_is_full_is_one_sentence() -> None:
    done = subprocess.run(
        "python -m rlprobe config schema > /dev/full", shell=True, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("rlprobe: error: standard output: No space left on device")
    assert done.stderr.count("\n") == 1


def test_what_no_path_is_known_of_names_where_the_command_writes() -> None:
    said = disk.sentence(OSError(errno.EIO, "Input/output error"), ("out", "store"))
    assert said.startswith("out or store: Input/output error; the device failed")
