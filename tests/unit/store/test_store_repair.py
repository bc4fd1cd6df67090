"""Is damage found, named with whose it is, never used again, and mended by verify's own words?"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.errors import StoreError
from rlprobe.store import alignments, publish
from rlprobe.store.alignments import forget_alignment, record_alignment
from rlprobe.store.commit import commit
from rlprobe.store.exporting import export
from rlprobe.store.gc import collect, remove
from rlprobe.store.importing import import_bundle
from rlprobe.store.objects import Objects
from rlprobe.store.read import Run, keys
from rlprobe.store.repair import repair
from rlprobe.store.verify import verify
from tests.unit.store.bundle_helpers import SMALL


def flip(path: Path, at: int | None = None) -> None:
    """Change one bit of a file, as a disk does: its name, its inode and its size stay."""
    data = bytearray(path.read_bytes())
    at = len(data) // 2 if at is None else at
    data[at] ^= 1
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(data)
    path.chmod(mode)


def object_of(run: Run, name: str) -> Path:
    """A run's file of which the object has only this one name in trees."""
    file = next(file for file in run.manifest.files if file.path == name)
    return Objects(run.store).path(file.sha256)


def commands(text: str) -> list[list[str]]:
    """What verify's words say to call, in the order in which they stand."""
    return [shlex.split(command) for command in re.findall(r"`([^`]+)`", text)]


def follow(store: Path, capsys: pytest.CaptureFixture[str], bundle: Path) -> None:
    """Do what verify says, literally, until it has nothing more to say."""
    for _ in range(5):
        capsys.readouterr()
        if main(["store", "verify", "--store", str(store)]) == 0:
            return
        # what needs the alignment's file is done elsewhere: a framework makes runs
        said = next(c for c in commands(capsys.readouterr().out) if "CONFIG" not in c)
        said = [str(bundle) if word == "FILE" else word for word in said]
        if said[0] == "rlprobe":
            main(said[1:])
        else:
            assert said[:2] == ["rm", "-r"]
            path = Path(said[2])
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    pytest.fail(capsys.readouterr().out)


def test_a_repeat_does_not_take_up_a_damaged_object_and_mends_the_one_that_has_it(committed, store):
    first = committed(**SMALL)
    damaged = object_of(first, "records/actor_update.parquet")
    flip(damaged)
    assert len(verify(store).problems) == 1
    second = committed("repeat", **SMALL)
    assert verify(store).problems == []
    name = "records/actor_update.parquet"
    assert (first.path / name).samefile(second.path / name)


def test_an_import_does_not_take_up_a_damaged_object_and_mends_the_run_that_has_it(
    committed, store, tmp_path
):
    run = committed(**SMALL)
    export(store, [run.key], tmp_path / "b")
    flip(object_of(run, "weights.parquet"))
    done = import_bundle(store, tmp_path / "b")
    assert done.new_runs == 0 and done.new_bytes > 0
    assert verify(store).problems == []


@pytest.mark.parametrize("linked", [True, False], ids=["links", "copies"])
def test_verify_names_the_runs_and_stages_of_an_object_and_the_way_back(
    committed, store, monkeypatch, linked
):
    if not linked:
        monkeypatch.setattr("rlprobe.store.objects.linked", lambda *_: False)
    first, second = committed(**SMALL), committed("repeat", **SMALL)
    path = object_of(first, "records/actor_update.parquet")
    flip(path)
    (problem,) = verify(store).problems
    assert problem.path == path
    assert problem.of == (
        f"run {first.key[:12]} (benchmark): actor_update",
        f"run {second.key[:12]} (repeat): actor_update",
    ) or problem.of == (
        f"run {second.key[:12]} (repeat): actor_update",
        f"run {first.key[:12]} (benchmark): actor_update",
    )
    if linked:  # every name of it is the same damaged file
        assert "no other copy is in this store" in problem.way
        assert f"store rm --force --store {store}" in problem.way
    else:
        assert "takes it from" in problem.way
        assert repair(store).now.problems == []


def _object(run: Run) -> None:
    flip(object_of(run, "dump/configurations.json"))


def _missing_object(run: Run) -> None:
    object_of(run, "environment.json").unlink()


def _file_of_the_tree(run: Run) -> None:
    (run.path / "weights.parquet").unlink()


def _other_file_in_the_tree(run: Run) -> None:
    path = run.path / "weights.parquet"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])


def _file_that_is_not_listed(run: Run) -> None:
    (run.path / "dump" / "note.txt").write_text("mine")


def _manifest(run: Run) -> None:
    flip(run.path / "manifest.json")


def _manifest_is_gone(run: Run) -> None:
    (run.path / "manifest.json").unlink()


def _copy_of_the_manifest(run: Run) -> None:
    (copy,) = (run.store / "manifests" / run.key).iterdir()
    flip(copy)


def _run_is_gone(run: Run) -> None:
    shutil.rmtree(run.path)


def _record(run: Run) -> None:
    path = run.store / "alignments" / "cpu.json"
    text = path.read_text()
    at = text.index(run.key)
    flip(path, at)


def _copy_of_the_record(run: Run) -> None:
    flip(run.store / "alignments" / "copies" / "cpu.json")


def _record_is_gone(run: Run) -> None:
    (run.store / "alignments" / "cpu.json").unlink()


def _both_records(run: Run) -> None:
    _record(run)
    _copy_of_the_record(run)


def _stray_file(run: Run) -> None:
    (run.store / "objects" / "sha256" / "ab").mkdir(exist_ok=True)
    (run.store / "objects" / "sha256" / "ab" / "notes").write_text("mine")


DAMAGE = [
    _object,
    _missing_object,
    _file_of_the_tree,
    _other_file_in_the_tree,
    _file_that_is_not_listed,
    _manifest,
    _manifest_is_gone,
    _copy_of_the_manifest,
    _run_is_gone,
    _record,
    _copy_of_the_record,
    _record_is_gone,
    _both_records,
    _stray_file,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_store_is_mended_by_doing_what_verify_says(
    committed, store, tmp_path, capsys, damage: Callable[[Run], None]
):
    run = committed(**SMALL)
    record_alignment(store, "cpu", [run.key])
    export(store, [run.key], tmp_path / "b")
    before = (run.path / "manifest.json").read_bytes()
    damage(run)
    assert verify(store).problems
    follow(store, capsys, tmp_path / "b")
    assert (run.path / "manifest.json").read_bytes() == before
    assert Run.open(store, run.key).weights() is not None
    if damage is _both_records:
        assert alignments.alignments(store) == {}
    else:
        assert alignments.alignments(store) == {"cpu": [run.key]}


def test_a_run_that_nothing_brings_back_is_dropped_and_the_others_stay(committed, store, capsys):
    run, other = committed(**SMALL), committed("target", seed=4, **SMALL)
    flip(object_of(run, "rollouts/step0.h5"))
    main(["store", "verify", "--store", str(store)])
    said = commands(capsys.readouterr().out)
    (drop,) = [words for words in said if words[:3] == ["rlprobe", "store", "rm"]]
    assert any(words[:3] == ["rlprobe", "run", "--force"] for words in said)
    assert main(drop[1:]) == 0
    assert keys(store) == [other.key]
    assert verify(store).problems == []


def test_a_flipped_key_in_a_record_makes_gc_delete_nothing(committed, store):
    run = committed(**SMALL)
    record_alignment(store, "cpu", [run.key])
    _record(run)
    with pytest.raises(StoreError, match=r"cpu\.json .*--repair"):
        collect(store)
    assert keys(store) == [run.key]


def test_a_record_of_the_first_format_is_believed_only_where_its_runs_are_here(committed, store):
    """A flipped digit of a key and a run that is not made yet look the same there."""
    run = committed(**SMALL)
    record = {"format": 1, "name": "cpu", "keys": [run.key]}
    path = store / "alignments" / "cpu.json"
    path.parent.mkdir()
    path.write_text(json.dumps(record))
    assert collect(store).kept_runs == 1
    path.write_text(json.dumps({**record, "keys": [run.key[:-1] + "x".replace("x", "0")]}))
    if run.key.endswith("0"):
        path.write_text(json.dumps({**record, "keys": [run.key[:-1] + "1"]}))
    with pytest.raises(StoreError, match="is of format 1, which nothing shows a change of"):
        collect(store)
    assert keys(store) == [run.key]
    forget_alignment(store, "cpu")
    assert collect(store, everything=True).runs == [run.key]


def test_a_flipped_digest_in_a_manifest_without_copy_makes_gc_delete_no_object(committed, store):
    run = committed(**SMALL)
    record_alignment(store, "cpu", [run.key])
    shutil.rmtree(store / "manifests")
    path = run.path / "manifest.json"
    text = path.read_text()
    digest = run.manifest.files[0].sha256
    other = ("0" if digest[0] != "0" else "1") + digest[1:]
    path.write_text(text.replace(digest, other))
    with pytest.raises(StoreError, match="nothing is deleted until"):
        collect(store)
    assert Objects(store).path(digest).exists()


def test_objects_of_a_run_that_was_removed_by_hand_stay_until_it_is_put_back(committed, store):
    run = committed(**SMALL)
    record_alignment(store, "cpu", [run.key])
    shutil.rmtree(run.path)
    assert collect(store).objects == 0
    assert repair(store).now.problems == [] and keys(store) == [run.key]


def test_what_an_earlier_version_made_is_sealed_by_repair(committed, store):
    run = committed(**SMALL)
    path = store / "alignments" / "cpu.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"format": 1, "name": "cpu", "keys": [run.key]}))
    shutil.rmtree(store / "manifests")
    found = verify(store)
    assert found.problems == [] and len(found.unchecked) == 2
    assert repair(store).now.unchecked == []
    _manifest(run)
    with pytest.raises(StoreError, match="not what was committed"):
        Run.open(store, run.key)


def test_a_damaged_store_is_not_sealed(committed, store):
    run = committed(**SMALL)
    shutil.rmtree(store / "manifests")
    flip(object_of(run, "weights.parquet"))
    assert len(repair(store).now.unchecked) == 1


def test_another_store_is_as_good_a_source_as_a_bundle(committed, store, tmp_path):
    run = committed(**SMALL)
    shutil.copytree(store, tmp_path / "other")
    flip(object_of(run, "weights.parquet"))
    flip(tmp_path / "other" / "runs" / run.key / "environment.json")
    done = repair(store, [tmp_path / "other"])
    assert done.now.problems == [] and len(done.mended) == 1


def test_a_source_that_lies_mends_nothing(committed, store, tmp_path):
    run = committed(**SMALL)
    shutil.copytree(store, tmp_path / "other")
    flip(object_of(run, "weights.parquet"))
    flip(Objects(tmp_path / "other").path(object_of(run, "weights.parquet").name))
    assert len(repair(store, [tmp_path / "other"]).now.problems) == 1
    with pytest.raises(StoreError, match="neither a bundle nor a store"):
        repair(store, [tmp_path / "scratch-0"])


def test_a_run_that_others_replayed_is_not_dropped_by_the_way(committed, store):
    first = committed(**SMALL)
    second = committed("target", declared={"replay_of": first.key}, **SMALL)
    with pytest.raises(StoreError, match=f"{second.key[:12]} replayed"):
        remove(store, first.key)
    assert remove(store, first.key[:8], force=True).runs == [first.key]
    found = verify(store)
    assert found.problems == [] and "is not here" in found.notes[0]


def test_one_run_that_cannot_be_read_does_not_hide_the_others(committed, store, capsys):
    bad, good = committed(**SMALL), committed("target", **SMALL)
    _manifest(bad)
    assert main(["store", "ls", "--store", str(store)]) == 1
    out = capsys.readouterr().out
    assert f"{bad.key[:16]}  cannot be read" in out and f"{good.key[:16]}  target" in out


@pytest.mark.parametrize("what", ["metrics", "mock_proof", "weights", "records", "key_data"])
def test_what_is_read_of_a_run_is_what_its_manifest_lists(committed, what):
    run = committed(**SMALL)
    path, read = {
        "metrics": ("metrics.jsonl", Run.metrics),
        "mock_proof": ("mock_proof.json", Run.mock_proof),
        "weights": ("weights.parquet", Run.weights),
        "records": ("records/actor_update.parquet", lambda r: r.records("actor_update")),
        "key_data": (
            "dump/data/responses/step0/rank0/micro_step0/responses.npy",
            Run.key_data,
        ),
    }[what]
    assert read(run) is not None
    flip(run.path / path)
    # key data are checked once an opened run
    with pytest.raises(StoreError, match="is not what was committed"):
        read(replace(run))
    (run.path / path).unlink()
    with pytest.raises(StoreError, match="its manifest lists it"):
        read(replace(run))


def test_key_data_that_no_manifest_lists_is_refused(committed):
    run = committed(**SMALL)
    (run.path / "dump" / "data" / "more.npy").write_bytes(b"x")
    with pytest.raises(StoreError, match="is not in the manifest"):
        run.key_data()


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [5, pytest.param(1, marks=pytest.mark.long)], ids=["every fifth call", "every call"]
)
@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "two renames"])
def test_a_replacement_killed_anywhere_keeps_the_old_run_or_has_the_new(
    committed, store, scratch, tmp_path, monkeypatch, swaps, every
):
    """A child dies at calls that change the file system, one after the other."""
    old = committed(**SMALL)
    before = (old.path / "manifest.json").read_bytes()
    other = tmp_path / "other"
    new = committed(at=other, seed=9, **SMALL)
    after = (new.path / "manifest.json").read_bytes()
    export(other, [new.key], tmp_path / "b")
    if not swaps:
        monkeypatch.setattr(publish, "swap", lambda *_: False)
    seen = set()
    for at in range(1, 200, every):
        place = tmp_path / f"store-{at}"
        shutil.copytree(store, place, copy_function=os.link)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):  # pytest's own are of the parent
                _die_at(at)
                import_bundle(place, tmp_path / "b", replace=True)
                os._exit(7)
            os._exit(8)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 7
            break
        # the next command that writes puts back what was taken away
        record_alignment(place, "more", [])
        commit(scratch(**SMALL), place, *_declared("target"))
        found = (place / "runs" / old.key / "manifest.json").read_bytes()
        assert found in (before, after), at
        seen.add(found)
        assert verify(place).problems == [], at
        shutil.rmtree(place)
    assert seen == {before, after}


def _declared(role: str) -> tuple[str, dict[str, object]]:
    from rlprobe.store.keys import run_key
    from tests.unit.store.conftest import declare

    declared = declare(role)
    return run_key(declared), declared


def _die_at(number: int) -> None:
    count = iter(range(1, 10**6))
    for name in ("link", "rename", "replace", "fsync", "mkdir", "chmod", "unlink", "rmdir"):
        real = getattr(os, name)

        def call(*args, _real=real, **kwargs):
            if next(count) == number:
                os.kill(os.getpid(), 9)
            return _real(*args, **kwargs)

        setattr(os, name, call)


def test_files_that_nfs_keeps_for_others_block_nothing(committed, store):
    run = committed(**SMALL)
    record_alignment(store, "cpu", [run.key])
    for place in (object_of(run, "weights.parquet").parent, run.path / "dump"):
        (place / ".nfs000000000000a1b200000001").write_bytes(b"x")
    assert verify(store).problems == []
    assert collect(store).objects == 0


def test_gc_waits_for_a_commit_when_told_to(committed, store):
    import threading

    from rlprobe.store import locks

    record_alignment(store, "cpu", [committed(**SMALL).key])
    holding, ended = threading.Event(), threading.Event()

    def user() -> None:
        with locks.shared(store):
            holding.set()
            ended.wait(10)

    thread = threading.Thread(target=user)
    thread.start()
    holding.wait(10)
    with pytest.raises(StoreError, match="or pass --wait"):
        collect(store, wait=0.3)
    threading.Timer(0.3, ended.set).start()
    assert collect(store, wait=30).kept_runs == 1
    thread.join()
