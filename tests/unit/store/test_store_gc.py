"""Does gc delete exactly what no alignment reaches, and never what is being committed?"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlprobe import files
from rlprobe.cli import main
from rlprobe.errors import StoreError
from rlprobe.store import attempts
from rlprobe.store.alignments import (
    alignments,
    copy_of,
    forget_alignment,
    keeping,
    record_alignment,
)
from rlprobe.store.gc import collect, remove
from rlprobe.store.keys import run_key
from rlprobe.store.objects import Objects
from rlprobe.store.read import keys
from rlprobe.store.tree import lay_out
from rlprobe.store.verify import verify
from tests.unit.store.conftest import declare


def test_what_an_alignment_reaches_stays_and_the_rest_goes(committed, store):
    kept = committed(seed=1)
    gone = committed("target", seed=2)
    record_alignment(store, "cpu", [kept.key])
    found = collect(store)
    assert found.runs == [gone.key]
    assert keys(store) == [kept.key]
    assert {o.sha256 for o in Objects(store)} == {f.sha256 for f in kept.manifest.files}
    assert found.bytes > 0
    assert verify(store).problems == []


def test_a_replay_keeps_the_run_it_was_replayed_from(committed, store):
    origin = committed()
    replay = committed("target", declared={"replay_of": origin.key})
    record_alignment(store, "cpu", [replay.key])
    assert collect(store).runs == []
    assert keys(store) == sorted([origin.key, replay.key])


def test_objects_that_runs_share_stay_while_one_of_them_does(committed, store):
    kept = committed()
    committed("repeat")
    record_alignment(store, "cpu", [kept.key])
    collect(store)
    assert verify(store).problems == []


def test_a_dry_run_says_the_same_and_deletes_nothing(committed, store):
    kept = committed(seed=1)
    committed("target", seed=2)
    record_alignment(store, "cpu", [kept.key])
    before = sorted(p for p in store.rglob("*") if p.is_file())
    told = collect(store, dry_run=True)
    assert sorted(p for p in store.rglob("*") if p.is_file()) == before
    assert collect(store) == told


def test_an_alignment_that_changed_lets_its_old_runs_go(committed, store):
    old, new = committed(seed=1), committed("target", seed=2)
    record_alignment(store, "cpu", [old.key])
    record_alignment(store, "cpu", [new.key])
    assert collect(store).runs == [old.key]


def test_a_forgotten_alignment_keeps_nothing(committed, store):
    run = committed()
    record_alignment(store, "a", [run.key])
    record_alignment(store, "b", [])
    forget_alignment(store, "a")
    assert collect(store).runs == [run.key]
    with pytest.raises(StoreError, match="records no alignment 'a'; it has b"):
        forget_alignment(store, "a")


def test_a_store_without_alignments_is_not_emptied_by_accident(committed, store):
    run = committed()
    with pytest.raises(StoreError, match=r"all of it \(1 run\) would go"):
        collect(store)
    assert keys(store) == [run.key]
    assert collect(store, everything=True).runs == [run.key]
    assert list(Objects(store)) == []


def test_an_alignment_may_name_runs_that_do_not_exist_yet(committed, store):
    kept = committed()
    record_alignment(store, "cpu", [kept.key, "0" * 64])
    assert collect(store).kept_runs == 1


def test_a_directory_that_snakemake_made_for_a_coming_run_stays(committed, store):
    record_alignment(store, "cpu", [committed().key])
    coming = store / "runs" / ("1" * 64)
    coming.mkdir()
    assert collect(store).runs == []
    assert coming.is_dir()


def test_what_killed_processes_left_goes(committed, store):
    record_alignment(store, "cpu", [committed().key])
    (store / "tmp" / "dead").mkdir(parents=True)
    (store / "tmp" / "dead" / "object-1").write_bytes(b"x")
    assert collect(store).leftovers == 1
    assert not any((store / "tmp").iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a readable alignment record"),
        ('{"format": 1}', "not a readable alignment record"),
        ('{"format": 1, "keys": [3]}', "not a readable alignment record"),
        ('{"format": 2, "keys": []}', "not a readable alignment record"),
        ('{"format": 1, "keys": ["x"]}', "is damaged"),
        ('{"format": 3, "keys": []}', "made by a newer rlprobe"),
    ],
)
def test_nothing_goes_while_a_record_cannot_be_read(committed, store, content, message):
    run = committed()
    record_alignment(store, "good", [])
    (store / "alignments" / "bad.json").write_text(content)
    with pytest.raises(StoreError, match=message):
        collect(store)
    assert keys(store) == [run.key]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("how", ["gc", "rm", "rm --force"])
def test_a_run_whose_copy_cannot_be_removed_stays(committed, store, monkeypatch, how, number):
    """Left behind by a run that went, it would be missed as one that was lost."""
    run = committed()
    record_alignment(store, "other", [])
    real = Path.unlink

    def refused(path, **more):
        if "manifests" in path.parts:
            raise OSError(number, os.strerror(number), str(path))
        real(path, **more)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refused)
        with pytest.raises(OSError, match=os.strerror(number)):
            collect(store) if how == "gc" else remove(store, run.key, force=how != "rm")
    assert keys(store) == [run.key]
    assert verify(store).problems == []
    remove(store, run.key)
    assert keys(store) == [] and verify(store).problems == []


def test_nothing_goes_while_a_kept_run_s_manifest_is_damaged(committed, store):
    kept = committed(seed=1)
    committed("target", seed=2)
    record_alignment(store, "cpu", [kept.key])
    (kept.path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="not what was committed"):
        collect(store)
    assert len(keys(store)) == 2


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a" * 201])
def test_a_name_that_is_no_file_name_is_refused(store, name):
    with pytest.raises(StoreError, match="alignment name"):
        record_alignment(store, name, [])


def test_a_key_that_is_none_is_refused(store):
    with pytest.raises(StoreError, match="'abc' is not a run key"):
        record_alignment(store, "cpu", ["abc"])


def test_a_record_is_what_the_interface_says(store):
    path = record_alignment(store, "cpu", ["1" * 64, "0" * 64, "1" * 64])
    assert path == store / "alignments" / "cpu.json"
    assert json.loads(path.read_text())["keys"] == ["0" * 64, "1" * 64]
    assert alignments(store) == {"cpu": ["0" * 64, "1" * 64]}


# ------------------------------------------------------------------------------ at the same time


#: Commits, but says so and waits for a line before the rename that shows the run.
SLOW_COMMIT = """
import json, os, sys
from pathlib import Path
from rlprobe.store.commit import commit
job = json.loads(sys.argv[1])
real = Path.rename
def wait_before_publishing(source, destination):
    if Path(destination).name == job["key"]:
        print("paused", flush=True)
        sys.stdin.readline()
    return real(source, destination)
Path.rename = wait_before_publishing
commit(Path(job["scratch"]), Path(job["store"]), job["key"], job["declared"])
"""

#: Commits one of a few runs and collects, again and again.
CHURN = """
import json, random, sys, time
from pathlib import Path
from rlprobe.errors import StoreError
from rlprobe.store.commit import commit
from rlprobe.store.gc import collect
from rlprobe.store.keys import run_key
job = json.loads(sys.argv[1])
chance = random.Random(job["number"])
until = time.time() + job["seconds"]
collected = 0
while time.time() < until:
    declared = {"role": "repeat", "seed": 1, "extra": chance.randrange(3)}
    commit(Path(job["scratch"]), Path(job["store"]), run_key(declared), declared)
    try:
        collect(Path(job["store"]))
        collected += 1
    except StoreError as error:
        assert "is in use" in str(error), error
print(collected)
"""


def start(code: str, **job) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, json.dumps(job, default=str)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_gc_refuses_while_a_commit_is_under_way_and_loses_nothing(scratch, committed, store):
    record_alignment(store, "cpu", [committed(seed=1).key])
    declared = {"role": "target", "seed": 2}
    key = run_key(declared)
    process = start(SLOW_COMMIT, scratch=scratch(seed=2), store=store, key=key, declared=declared)
    assert process.stdout.readline() == "paused\n"
    with pytest.raises(StoreError, match="is in use: a commit, import or export"):
        collect(store)
    process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert key in keys(store)
    assert verify(store).problems == []


@pytest.mark.slow
def test_commits_and_collections_at_once_never_damage_a_kept_run(make_scratch, committed, memory):
    store = memory / "store"
    kept = committed(at=store, seed=1, stages=("actor_update",))
    record_alignment(store, "cpu", [kept.key])
    # The same numbers: the runs that come and go share every object with the one that is kept.
    place = make_scratch(memory / "scratch", seed=1, stages=("actor_update",))
    processes = [
        start(CHURN, scratch=place, store=store, number=number, seconds=4) for number in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(map(int, outputs)) > 0, "gc never found the store free"
    assert verify(store).problems == []
    collect(store)
    assert keys(store) == [kept.key]


def test_where_the_file_system_has_no_locks_gc_wants_to_be_told(committed, store, monkeypatch):
    record_alignment(store, "cpu", [committed().key])

    def unsupported(*_args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("rlprobe.files.fcntl.flock", unsupported)
    gone = committed("target")
    with pytest.raises(StoreError, match="pass --no-lock"):
        collect(store)
    assert collect(store, lock=False).runs == [gone.key]


@pytest.mark.parametrize("locked_before", [True, False])
def test_a_store_that_may_only_be_read_is_read(
    committed, store, tmp_path, monkeypatch, locked_before
):
    run = committed()
    if not locked_before:
        (store / "locks" / "store.lock").unlink()
    real = Path.open

    def forbidden(self, mode="r", *args, **kwargs):
        if "a" in mode and self.name == "store.lock":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", forbidden)
    assert lay_out(run, tmp_path / "out") > 0
    with pytest.raises(PermissionError):
        collect(store, everything=True)


def test_a_run_that_fails_takes_nothing_from_what_is_kept(committed, store):
    finished = committed(seed=1)
    record_alignment(store, "cpu", [finished.key])
    with pytest.raises(StoreError, match="no memory"), keeping(store, "cpu", ["0" * 64]):
        raise StoreError("no memory")
    assert collect(store).runs == [] and keys(store) == [finished.key]


def test_what_was_kept_before_goes_when_all_that_is_wanted_is_there(committed, store):
    before, first = committed(), committed("target")
    record_alignment(store, "cpu", [before.key])
    second = run_key(declare("repeat"))
    with keeping(store, "cpu", [first.key, second]):
        pass  # one of two: what was there is still all that can be looked at
    assert collect(store).runs == []
    with keeping(store, "cpu", [first.key, second]):
        assert committed("repeat").key == second
    assert alignments(store) == {"cpu": sorted([first.key, second])}
    assert collect(store).runs == [before.key]


def test_what_another_process_waits_for_stays_kept(committed, store):
    mine, other = committed(), committed("target")
    with keeping(store, "cpu", [mine.key]):
        record_alignment(store, "cpu", [mine.key, other.key])
    assert collect(store).runs == []


def test_a_record_that_cannot_be_read_is_written_anew(committed, store):
    run = committed()
    path = record_alignment(store, "cpu", [run.key])
    for place in (path, copy_of(path)):
        place.write_text("{", encoding="utf-8")
    with keeping(store, "cpu", [run.key]):
        pass
    assert alignments(store) == {"cpu": [run.key]}


def test_what_a_damaged_records_copy_names_is_kept(committed, store):
    finished = committed()
    record_alignment(store, "cpu", [finished.key]).write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match="no memory"), keeping(store, "cpu", ["0" * 64]):
        raise StoreError("no memory")
    assert collect(store).runs == []


def attempt(store, key, *, ended=False):
    """What a run that nobody makes any more left."""
    (store / "locks").mkdir(parents=True, exist_ok=True)
    (store / "locks" / f"{key}.lock").touch()
    left = attempts.named(store, key, 4711)
    (left / "side").mkdir(parents=True)
    (left / "side" / "records.bin").write_bytes(b"x" * 8192)
    if ended:
        attempts.record(left).write_text("{}")
    return left


def test_what_a_failed_attempt_left_goes_with_its_size(committed, store):
    record_alignment(store, "cpu", [committed().key])
    left = attempt(store, "ab" * 32)
    would = collect(store, dry_run=True)
    assert left.is_dir()
    assert would.attempts == [left.name] and would.attempts_bytes >= 8192
    assert collect(store).attempts == [left.name]
    assert not left.exists()
    assert collect(store).attempts == []


def test_an_attempt_that_somebody_is_at_work_on_stays(committed, store):
    record_alignment(store, "cpu", [committed().key])
    busy, idle = attempt(store, "ab" * 32), attempt(store, "cd" * 32)
    with attempts.alone(store, "ab" * 32):
        assert collect(store).attempts == [idle.name]
    assert busy.is_dir()
    assert collect(store).attempts == [busy.name]


def test_on_a_file_system_without_locks_the_holders_file_says_who_is_at_work(
    committed, store, monkeypatch
):
    record_alignment(store, "cpu", [committed().key])
    left = attempt(store, "ab" * 32)
    monkeypatch.setattr(files, "hold", lambda *_, **__: False)
    with attempts.alone(store, "ab" * 32):
        assert collect(store, lock=False).attempts == []
    assert collect(store, lock=False).attempts == [left.name]


def test_an_attempt_that_ran_to_its_end_stays_until_its_run_is_in_the_store(committed, store):
    run = committed()
    record_alignment(store, "cpu", [run.key])
    ended, in_the_store = attempt(store, "ab" * 32, ended=True), attempt(store, run.key, ended=True)
    found = collect(store)
    assert found.uncommitted == [ended.name] and ended.is_dir()
    assert found.attempts == [in_the_store.name] and not in_the_store.exists()


def test_of_an_attempt_without_a_lock_nothing_is_known_and_it_stays(committed, store):
    record_alignment(store, "cpu", [committed().key])
    left = attempt(store, "ab" * 32)
    (store / "locks" / f"{'ab' * 32}.lock").unlink()
    (store / "scratch" / "mine").mkdir()
    assert collect(store).attempts == []
    assert left.is_dir() and (store / "scratch" / "mine").is_dir()


def test_the_command_says_what_attempts_left(committed, store, capsys):
    record_alignment(store, "cpu", [committed().key])
    attempt(store, "ab" * 32)
    ended = attempt(store, "cd" * 32, ended=True)
    assert main(["store", "gc", "--store", str(store)]) == 0
    said = capsys.readouterr().out
    assert "also what failed or killed attempts at 1 run left, " in said
    assert f"scratch/{ended.name} ran to its end and is not committed" in said
