"""Do runs arrive as they left, and does nothing else get in?"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlprobe.errors import StoreError
from rlprobe.store import bundle
from rlprobe.store.alignments import alignments
from rlprobe.store.exporting import export
from rlprobe.store.gc import collect
from rlprobe.store.importing import import_bundle
from rlprobe.store.objects import Objects
from rlprobe.store.read import Run, keys
from rlprobe.store.verify import verify
from tests.unit.store.bundle_helpers import SMALL, refused


def test_a_run_arrives_as_it_left(committed, store, tmp_path):
    run = committed(steps=2, ranks=2)
    done = export(store, [run.key[:8]], tmp_path / "b")
    other = tmp_path / "other"
    imported = import_bundle(other, tmp_path / "b", digest=f"sha256:{done.sha256}")
    assert imported.keys == [run.key] and imported.new_runs == 1
    there = Run.open(other, run.key)
    assert there.manifest == run.manifest
    for file in run.manifest.files:
        assert (there.path / file.path).read_bytes() == (run.path / file.path).read_bytes()
    assert verify(other).problems == []


def test_the_same_runs_are_the_same_bytes_in_any_order_from_any_store(committed, store, tmp_path):
    a, b = committed(), committed("target", seed=3)
    first = export(store, [a.key, b.key], tmp_path / "1")
    assert export(store, [b.key, a.key, b.key], tmp_path / "2").sha256 == first.sha256
    import_bundle(tmp_path / "other", tmp_path / "1")
    assert export(tmp_path / "other", [b.key, a.key], tmp_path / "3").sha256 == first.sha256
    assert first.sha256 == hashlib.sha256((tmp_path / "3").read_bytes()).hexdigest()


def test_any_tar_lists_it(exported):
    with tarfile.open(exported.path) as archive:
        members = archive.getmembers()
    assert members[0].name == "rlprobe-bundle.json"
    assert all(member.isreg() and member.mtime == 0 and member.uid == 0 for member in members)
    assert [m.size for m in members[2:]] == [o.size for o in exported.index.objects]


def test_a_header_is_the_one_that_tarfile_would_read_and_write():
    for size in (0, 511, 8**11 - 1, 8**11, 1 << 60):
        found = tarfile.TarInfo.frombuf(bundle.header("objects/x", size), "ascii", "strict")
        assert (found.name, found.size, found.type) == ("objects/x", size, tarfile.REGTYPE)


def test_shared_objects_are_carried_once(committed, store, tmp_path):
    a, b = committed(), committed("repeat")
    one = export(store, [a.key], tmp_path / "1")
    two = export(store, [a.key, b.key], tmp_path / "2")
    assert two.index.objects == one.index.objects


def test_importing_twice_brings_nothing_new(exported, tmp_path):
    other = tmp_path / "other"
    assert import_bundle(other, exported.path).new_runs == 1
    again = import_bundle(other, exported.path)
    assert (again.new_runs, again.new_bytes) == (0, 0)


def test_an_imported_run_is_not_garbage(exported, tmp_path):
    other = tmp_path / "other"
    imported = import_bundle(other, exported.path)
    assert collect(other).runs == []
    assert list(alignments(other)) == [imported.alignment]


def test_a_run_that_is_there_but_different_is_not_overwritten(exported, committed, tmp_path):
    other = tmp_path / "other"
    mine = committed(at=other, **SMALL, seed=4)
    with pytest.raises(StoreError, match=f"has a run {mine.key[:12]} already, made elsewhere"):
        import_bundle(other, exported.path)
    assert Run.open(other, mine.key).manifest == mine.manifest
    import_bundle(other, exported.path, replace=True)
    assert Run.open(other, mine.key).manifest != mine.manifest
    assert verify(other).problems == []


def test_what_cannot_be_exported_is_said(committed, store, tmp_path):
    run = committed()
    with pytest.raises(StoreError, match="no run abcd in"):
        export(store, ["abcd"], tmp_path / "b")
    with pytest.raises(StoreError, match="no run was chosen"):
        export(store, [], tmp_path / "b")
    (tmp_path / "b").touch()
    with pytest.raises(StoreError, match="exists; remove it"):
        export(store, [run.key], tmp_path / "b")


def test_a_damaged_object_is_not_exported(committed, store, tmp_path):
    run = committed()
    path = Objects(store).path(run.manifest.files[0].sha256)
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match="is damaged in the store"):
        export(store, [run.key], tmp_path / "b")
    assert not (tmp_path / "b").exists()
    path.unlink()
    with pytest.raises(StoreError, match="is missing or truncated"):
        export(store, [run.key], tmp_path / "b")


# ------------------------------------------------------------------------------------- interrupted


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_an_interrupted_export_goes_on_and_gives_the_same_bytes(exported, store, data):
    whole = exported.path.read_bytes()
    key = exported.index.runs[0].key
    again = exported.path.with_name("again")
    again.unlink(missing_ok=True)
    part = exported.path.with_name("again.part")
    cut = data.draw(st.integers(0, len(whole)))
    content = bytearray(whole[:cut])
    if cut and data.draw(st.booleans()):  # what a crash of the machine may leave
        content[data.draw(st.integers(0, cut - 1))] ^= 0xFF
    part.write_bytes(content)
    done = export(store, [key], again)
    assert again.read_bytes() == whole
    assert done.sha256 == exported.sha256
    assert not part.exists()
    if content == whole[:cut]:
        assert cut - 1100 - max(o.size for o in exported.index.objects) < done.resumed <= cut


def test_another_export_s_rest_does_not_get_in(committed, store, tmp_path, exported):
    other = committed("target", **SMALL, seed=8)
    fresh = export(store, [other.key], tmp_path / "fresh")
    (tmp_path / "b.part").write_bytes(exported.path.read_bytes())
    assert export(store, [other.key], tmp_path / "b").sha256 == fresh.sha256


def test_a_truncated_bundle_is_refused_and_the_whole_one_then_costs_only_the_rest(
    committed, store, tmp_path
):
    run = committed()
    done = export(store, [run.key], tmp_path / "b")
    data = done.path.read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) * 2 // 3])
    other = tmp_path / "other"
    refused(tmp_path / "cut", other, "ends early")
    kept = sum(stored.size for stored in Objects(other))
    assert kept > 0
    imported = import_bundle(other, done.path)
    total = sum(entry.size for entry in done.index.objects)
    assert imported.new_bytes == total - kept
    assert verify(other).problems == []


def test_every_truncation_is_refused(exported, tmp_path):
    data = exported.path.read_bytes()
    for length in {0, 1, 511, 512, 513, len(data) - 1, len(data) - 512, *range(0, len(data), 997)}:
        (tmp_path / "cut").write_bytes(data[:length])
        refused(tmp_path / "cut", tmp_path / "other", r"cut: ")


def test_a_store_that_was_carried_by_hand_is_verified_as_such(exported, store, tmp_path):
    shutil.copytree(store, tmp_path / "copy")  # links become copies
    assert verify(tmp_path / "copy").problems == []


def _legacy_tensor(scratch):
    """A tensor of torch's format from before zip files, too large to be packed."""
    path = scratch / "dump/actor_update/step0/rank0/dump_tensor_data"
    path.mkdir(exist_ok=True)
    (path / "a.pt").write_bytes(b"\x80\x02\x8a\n" + bytes(2 << 20))


def _file(name: str, content: bytes = b"{}"):
    def write(scratch):
        path = scratch / "dump" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    write.__name__ = name.rpartition("/")[2][:20]
    return write


def _environment(scratch):
    facts = {"role": "benchmark", "environment": {"PS1": "\x1b[31m", "NAME": "caf\udce9"}}
    (scratch / "side" / "run.json").write_text(json.dumps(facts))


def _numbers(scratch):
    (scratch / "side" / "metrics.jsonl").write_text('{"step": 0, "metrics": {"loss": NaN}}\n')


@pytest.mark.parametrize(
    "odd",
    [
        _file("core.12345", b"\x7fELF"),
        _file("notes.yaml", b"mine"),
        _file("actor_update/step0/rank0/state.pkl", b"\x80\x04."),
        _file("actor_update/step0/rank0/nohup.out", b"text"),
        _file("actor_update/step0/rank0/empty.json", b""),
        _file("actor_update/step0/rank0/number.json", b"3"),
        _file("actor_update/step0/rank0/zeros.npy", bytes(10)),
        _file("memory_snapshot/rank0/step0.pickle", b"\x80\x04."),
        _file("data/" + "k" * 200 + "/step0/rank0/micro_step0/x.npy", b"\x93NUMPY"),
        _file("actor_update/step0/rank0/überschrift.txt", b"text"),
        _file("actor_update/step0/rank0/\udce9.txt", b"text"),
        _file("actor_update/step0/rank0/a\nb.txt", b"text"),
        _legacy_tensor,
        _environment,
        _numbers,
    ],
    ids=lambda odd: ascii(odd.__name__.strip("_")),
)
def test_what_commit_takes_export_writes_and_import_takes(committed, scratch, store, tmp_path, odd):
    place = scratch(**SMALL)
    odd(place)
    try:
        run = committed(scratch_at=place)
    except StoreError as error:
        assert keys(store) == [] and "\n" not in str(error)
        return  # refused at once, with the scratch space still there
    export(store, [run.key], tmp_path / "b")
    import_bundle(tmp_path / "other", tmp_path / "b")
    other = Run.open(tmp_path / "other", run.key)
    assert other.manifest == run.manifest
    assert verify(tmp_path / "other").problems == []


def test_a_file_of_no_known_kind_is_left_out_and_said(committed, scratch, caplog):
    place = scratch(**SMALL)
    (place / "dump" / "core.12345").write_bytes(b"\x7fELF")
    run = committed(scratch_at=place)
    assert "core.12345" in caplog.text
    assert run.manifest.volatile["dump"]["left_out"] == {"core.12345": [""]}
    assert not (run.path / "dump" / "core.12345").exists()
