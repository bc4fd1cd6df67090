"""Does nothing get in that a damaged or made-up bundle would bring?"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlprobe.errors import StoreError
from rlprobe.store import bundle
from rlprobe.store.exporting import export
from rlprobe.store.importing import import_bundle
from rlprobe.store.read import Run
from tests.unit.store.bundle_helpers import (
    SMALL,
    join,
    member,
    refused,
    rewritten,
    rewritten_from,
    split,
    with_manifest,
)

pytestmark = pytest.mark.slow

_CORPUS = Path(__file__).parents[1] / "hostile/corpus"
ENDING, PANICKING = (_CORPUS / f"records-{number}-1.parquet" for number in (4, 3))
CUT = ENDING.read_bytes()[:200] + ENDING.read_bytes()[-400:]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_byte_can_be_changed(exported, tmp_path, data):
    content = bytearray(exported.path.read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= data.draw(st.integers(1, 255))
    (tmp_path / "b").write_bytes(content)
    refused(tmp_path / "b", tmp_path / "other", r"b: ")


def test_the_digest_of_the_whole_file_is_checked_first(exported, tmp_path):
    refused(exported.path, tmp_path / "other", "has digest", digest="sha256:" + "0" * 64)


def test_what_is_no_bundle_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"something else" * 100)
    refused(tmp_path / "x", tmp_path / "other", "not a bundle that `rlprobe store export` wrote")
    with pytest.raises(StoreError, match="does not exist"):
        import_bundle(tmp_path / "other", tmp_path / "nowhere")
    with pytest.raises(StoreError, match="not a plain file"):
        import_bundle(tmp_path / "other", tmp_path)


def test_rewriting_without_a_change_gives_the_same_bytes(exported, tmp_path):
    assert rewritten(exported, tmp_path / "b", lambda i, m: None).read_bytes() == (
        exported.path.read_bytes()
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (member("objects/x", kind=tarfile.SYMTYPE, link="/etc/passwd"), "is a symbolic link"),
        (member("objects/x", kind=tarfile.LNKTYPE, link="objects/y"), "is a hard link"),
        (member("objects/x", kind=tarfile.CHRTYPE), "is a character device"),
        (member("objects/x", kind=tarfile.BLKTYPE), "is a block device"),
        (member("objects/x", kind=tarfile.FIFOTYPE), "is a pipe"),
        (member("objects", kind=tarfile.DIRTYPE), "is a directory"),
        (member("x", b"path=/etc/x\n", kind=tarfile.XHDTYPE), "is an extended header"),
        (member("../../etc/passwd", b"x"), "would leave the store"),
        (member("/etc/passwd", b"x"), "would leave the store"),
        (member("objects/../../x", b"x"), "would leave the store"),
        (member("objects/other", b"x"), "stands where runs/"),
    ],
)
def test_a_member_that_does_not_belong_is_refused_by_name(exported, tmp_path, extra, message):
    archive = rewritten(exported, tmp_path / "b", lambda i, m: [extra, *m])
    refused(archive, tmp_path / "other", message)


def test_a_member_twice_is_refused(exported, tmp_path):
    archive = rewritten(exported, tmp_path / "b", lambda i, m: [*m[:2], m[1], *m[2:]])
    refused(archive, tmp_path / "other", "stands where objects/")


def test_a_member_after_the_last_is_refused(exported, tmp_path):
    archive = rewritten(exported, tmp_path / "b", lambda i, m: [*m, m[-1]])
    refused(archive, tmp_path / "other", "its end is missing")
    with exported.path.open("ab") as file:
        file.write(bytes(512))
    refused(exported.path, tmp_path / "other", "something follows its end")


def test_a_missing_member_is_refused(exported, tmp_path):
    archive = rewritten(exported, tmp_path / "b", lambda i, m: m[:-1])
    refused(archive, tmp_path / "other", "the archive ends before objects/")


def test_a_member_with_the_wrong_content_is_refused(exported, tmp_path):
    def swap(index, members):
        info, content = members[-1]
        return [*members[:-1], (info, bytes(len(content)))]

    refused(rewritten(exported, tmp_path / "b", swap), tmp_path / "other", "holds [0-9a-f]{64}")


def test_an_object_that_is_there_already_is_checked_all_the_same(exported, tmp_path):
    other = tmp_path / "other"
    import_bundle(other, exported.path)
    data = bytearray(exported.path.read_bytes())
    data[-1024 - 512] ^= 1  # in the last object or what fills its block
    (tmp_path / "b").write_bytes(data)
    with pytest.raises(StoreError, match=r"b: objects/"):
        import_bundle(other, tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.update(format=2), "the bundle was made by a newer rlprobe: its format is 2"),
        (lambda i: i.pop("format"), "the bundle has format None"),
        (lambda i: i.update(extra=1), "extra: Extra inputs"),
        (lambda i: i.update(runs=[]), "runs: List should have at least 1"),
        (lambda i: i["runs"].append(i["runs"][0]), "is listed twice"),
        (lambda i: i["objects"].append(i["objects"][-1]), "is listed twice"),
        (lambda i: i["objects"].reverse(), "is out of order"),
        (lambda i: i["objects"][0].update(sha256="../../x"), "sha256: String should match"),
        (lambda i: i["objects"][0].update(size=-1), "size"),
        (lambda i: i["objects"][0].update(size=1 << 70), "size"),
        (lambda i: i["objects"][0].update(size="3"), "size"),
        (lambda i: i["runs"][0].update(key="0" * 64), "stands where runs/0000"),
        (lambda i: i["runs"][0].update(size=1 << 40), "size"),
        (lambda i: i["objects"].pop(), "is not in it"),
    ],
)
def test_an_index_that_lies_is_refused(exported, tmp_path, change, message):
    archive = rewritten(exported, tmp_path / "b", lambda i, m: change(i) and None)
    refused(archive, tmp_path / "other", message)


@pytest.mark.parametrize("index", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_an_index_that_is_no_json_object_is_refused(tmp_path, index):
    head = tarfile.TarInfo("rlprobe-bundle.json")
    head.mode = 0o444
    archive = join(tmp_path / "b", [(head, index)])
    refused(
        archive,
        tmp_path / "other",
        r"b: (its index: .*(not JSON|deeper)|the bundle has format None)",
    )


def test_an_index_that_claims_more_than_it_has_is_refused_without_reading(tmp_path):
    (tmp_path / "b").write_bytes(bundle.header("rlprobe-bundle.json", 7 << 30) + bytes(1024))
    refused(tmp_path / "b", tmp_path / "other", "its index claims 7516192768 bytes")


def test_a_rebuilt_bundle_is_accepted_so_that_what_follows_proves_something(exported, tmp_path):
    archive = with_manifest(exported, tmp_path / "b", lambda m: None)
    assert len(import_bundle(tmp_path / "other", archive).keys) == 1


@pytest.mark.parametrize(
    "path",
    ["../../../x.json", "/etc/x.json", "dump/../../x.json", "manifest.json", "objects/x.json", ""],
)
def test_a_manifest_cannot_place_a_file_outside_its_run(exported, tmp_path, path):
    archive = with_manifest(exported, tmp_path / "b", lambda m: m["files"][0].update(path=path))
    refused(archive, tmp_path / "other", r"files\.0\.path|has no place")


def test_a_manifest_of_another_key_is_refused(exported, tmp_path):
    def change(index, members):
        index["runs"][0]["key"] = "f" * 64
        info = tarfile.TarInfo("runs/" + "f" * 64 + "/manifest.json")
        info.mode = 0o444
        return [(info, members[0][1]), *members[1:]]

    refused(rewritten(exported, tmp_path / "b", change), tmp_path / "other", "is the manifest of")


def test_an_object_of_no_run_is_refused(exported, tmp_path):
    stray = b"stray"
    archive = with_manifest(
        exported, tmp_path / "b", lambda m: None, {hashlib.sha256(stray).hexdigest(): stray}
    )
    refused(archive, tmp_path / "other", "belongs to none of its runs")


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("dump/x.pkl", b"\x80\x04K\x01.", "files of this kind do not belong"),
        ("dump/x", b"#!/bin/sh", "files of this kind do not belong"),
        ("dump/x.so", b"\x7fELF", "files of this kind do not belong"),
        ("dump/x.npy", b"\x80\x04K\x01.", "is not the .npy file that its name says"),
        ("dump/x.pt", b"\x80\x02}q\x00.", "is not the .pt file that its name says"),
        ("records/x.parquet", b"PAR2", "is not the .parquet file that its name says"),
        ("rollouts/step0.h5", b"", "is not the .h5 file that its name says"),
        ("dump/x.json", b"\x80\x04K\x01.", "is not the .json file that its name says"),
        ("dump/x.json", b'{"a": "\0"}', "is not the .json file that its name says"),
        ("dump/x.log", b"\0", "is not the .log file that its name says"),
        # by the type's mark a table, and none: it ends, panics or stops the process that reads it
        ("records/x.parquet", ENDING.read_bytes(), r"x.parquet is no table .*memory allocation of"),
        ("records/x.parquet", PANICKING.read_bytes(), "x.parquet is no table that can be read"),
        ("weights.parquet", b"PAR1 nothing PAR1", "weights.parquet is no table that can be read"),
        ("token_sketches/x.parquet", CUT, "x.parquet is no table that can be read"),
    ],
)
def test_a_file_of_another_type_than_its_name_says_is_refused(
    exported, tmp_path, path, content, message
):
    digest = hashlib.sha256(content).hexdigest()
    gone: set[str] = set()

    def add(manifest):
        manifest["files"] = [f for f in manifest["files"] if f["path"] != path]
        manifest["files"].append({"path": path, "sha256": digest, "size": len(content)})

    def change(manifest):
        gone.update(f["sha256"] for f in manifest["files"] if f["path"] == path)
        add(manifest)

    archive = with_manifest(exported, tmp_path / "b", change, {digest: content})
    if gone:  # its object belongs to no run any more: leave it out as well
        members = [(i, c) for i, c in split(archive)[1:] if i.name[8:] not in gone]

        def drop(index, _):
            index["objects"] = [o for o in index["objects"] if o["sha256"] not in gone]
            return members

        archive = rewritten_from(archive, tmp_path / "c", drop)
    refused(archive, tmp_path / "other", message)


def test_a_memory_snapshot_may_be_carried_though_nobody_opens_it(exported, tmp_path):
    content = b"\x80\x04K\x01."
    digest = hashlib.sha256(content).hexdigest()
    entry = {"path": "dump/memory_snapshot/r.pickle", "sha256": digest, "size": len(content)}
    archive = with_manifest(
        exported, tmp_path / "b", lambda m: m["files"].append(entry), {digest: content}
    )
    assert len(import_bundle(tmp_path / "other", archive).keys) == 1


def test_bytes_of_a_link_header_cannot_be_smuggled_in_as_content(exported, tmp_path):
    """Content that looks like headers is content."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as archive:
        info = tarfile.TarInfo("x")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    content = b"[]" + inner.getvalue().replace(b"\0", b" ")
    digest = hashlib.sha256(content).hexdigest()
    entry = {"path": "dump/x.json", "sha256": digest, "size": len(content)}
    archive_path = with_manifest(
        exported, tmp_path / "b", lambda m: m["files"].append(entry), {digest: content}
    )
    imported = import_bundle(tmp_path / "other", archive_path)
    run = Run.open(tmp_path / "other", imported.keys[0])
    assert (run.path / "dump/x.json").read_bytes() == content
    assert not any(path.is_symlink() for path in (tmp_path / "other").rglob("*"))


def test_a_run_of_several_that_is_wrong_keeps_all_out(committed, store, tmp_path):
    a, b = committed(**SMALL), committed("target", **SMALL, seed=3)
    done = export(store, [a.key, b.key], tmp_path / "b")
    data = bytearray(done.path.read_bytes())
    data[-2000] ^= 1
    (tmp_path / "bad").write_bytes(data)
    refused(tmp_path / "bad", tmp_path / "other", "bad: ")
