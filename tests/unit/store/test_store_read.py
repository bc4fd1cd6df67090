"""Are runs found, verified and laid out, and is damage seen?"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import replace

import pytest

from rlprobe.cli import main
from rlprobe.errors import StoreError
from rlprobe.store import gc, packing, read
from rlprobe.store.alignments import record_alignment
from rlprobe.store.exporting import export
from rlprobe.store.objects import Objects, Stored
from rlprobe.store.read import Run
from rlprobe.store.tree import lay_out
from rlprobe.store.verify import verify


def test_a_run_is_found_by_the_beginning_of_its_key(committed, store):
    run = committed()
    assert Run.open(store, run.key[:4]).key == run.key
    assert [found.key for found in read.runs(store)] == [run.key]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("0" * 64, "no run 0000.* in .*; it has [0-9a-f]{12}"),
        ("xyz", "'xyz' is no run key"),
        ("abc", "'abc' is no run key"),
        ("../../etc", "is no run key"),
    ],
)
def test_a_key_that_finds_nothing_says_what_there_is(committed, store, key, message):
    committed()
    with pytest.raises(StoreError, match=message):
        Run.open(store, key)


def test_an_ambiguous_beginning_lists_its_runs(store, committed):
    run = committed()
    twin = run.key[:10] + "".join("0" if c != "0" else "1" for c in run.key[10:])
    (store / "runs" / twin).mkdir()
    (store / "runs" / twin / "manifest.json").write_bytes(run.manifest.to_bytes())
    with pytest.raises(StoreError, match=r"begins 2 run keys"):
        Run.open(store, run.key[:8])
    with pytest.raises(StoreError, match="holds the manifest of another run"):
        Run.open(store, twin)


def test_a_directory_without_manifest_is_no_run(store, committed):
    committed()
    (store / "runs" / ("0" * 64) / "dump").mkdir(parents=True)
    assert len(read.keys(store)) == 1


def test_a_stage_that_was_not_captured_is_said(committed):
    with pytest.raises(StoreError, match=r"stage critic_update was not captured; captured: actor_"):
        committed().records("critic_update")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mock_proof.json", Run.mock_proof),
        ("environment.json", Run.environment),
        ("metrics.jsonl", Run.metrics),
        ("weights.parquet", Run.weights),
    ],
)
def test_a_damaged_file_is_named(committed, name, call):
    run = committed()
    (run.path / name).unlink()
    (run.path / name).write_bytes(b"{")
    with pytest.raises(StoreError, match=name):
        call(run)


@pytest.mark.parametrize(
    ("name", "call", "value"),
    [
        ("mock_proof.json", Run.mock_proof, {}),
        ("mock_proof.json", Run.mock_proof, {"samples": {"0": []}}),
        ("mock_proof.json", Run.mock_proof, {"samples": [{"step": 0, "rank": 0}]}),
        ("mock_proof.json", Run.mock_proof, {"samples": ["sha256:"]}),
        ("environment.json", Run.environment, {}),
        ("environment.json", Run.environment, {"processes": [1]}),
        ("environment.json", Run.environment, {"processes": {"actor-rank0": "torch"}}),
    ],
)
def test_a_file_that_says_something_else_is_damage(committed, monkeypatch, name, call, value):
    """Of a run from elsewhere, whose manifest vouches for it all the same."""
    run = committed()
    odd = run.path.parent / name
    odd.write_text(json.dumps({"format": 1, **value}))
    monkeypatch.setattr("rlprobe.store.listing.checked", lambda *_: odd)
    with pytest.raises(StoreError, match=f"{name} is damaged"):
        call(run)


def test_a_file_that_the_manifest_does_not_list_is_not_read(committed):
    run = committed(rollouts=False)
    (run.path / "rollouts").mkdir()
    (run.path / "rollouts" / "step0.h5").touch()
    assert run.rollouts == {}


# ---------------------------------------------------------------------------------------- verify


def damage(path, data=None):
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if data is None else data)


def test_a_flipped_bit_in_an_object_is_found(committed, store):
    run = committed()
    entry = run.manifest.files[3]
    damage(Objects(store).path(entry.sha256))
    found = verify(store).problems
    assert [p.path for p in found] == [Objects(store).path(entry.sha256)]
    assert "with digest" in found[0].what


def test_a_copy_in_the_tree_is_checked_on_its_own(committed, store):
    run = committed()
    entry = run.manifest.files[0]
    path = run.path / entry.path
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert verify(store).problems == []
    damage(path)
    assert [p.path for p in verify(store).problems] == [path]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda run, store: (run.path / "metrics.jsonl").unlink(), "cannot be read"),
        (lambda run, store: (run.path / "dump" / "more").touch(), "is not in the manifest"),
        (lambda run, store: (run.path / "manifest.json").write_text("{"), "not what was committed"),
        (
            lambda run, store: Objects(store).path(run.manifest.files[0].sha256).unlink(),
            "is missing",
        ),
        (
            lambda run, store: (
                (store / "objects/sha256/ab").mkdir(exist_ok=True)
                or (store / "objects/sha256/ab/abc").touch()
            ),
            "is no object",
        ),
    ],
)
def test_what_is_missing_or_too_many_is_found(committed, store, change, what):
    change(committed(), store)
    found = verify(store).problems
    assert found and any(what in problem.what for problem in found)


def test_a_link_in_place_of_a_file_is_found(committed, store):
    run = committed()
    path = run.path / "metrics.jsonl"
    path.unlink()
    path.symlink_to(Objects(store).path(run.manifest.files[0].sha256))
    assert [p.what for p in verify(store).problems] == ["is no plain file"]


def test_one_run_can_be_verified_alone(committed, store):
    good, bad = committed(), committed("target", seed=9)
    only_bad = {f.sha256 for f in bad.manifest.files} - {f.sha256 for f in good.manifest.files}
    damage(Objects(store).path(min(only_bad)))
    assert verify(store, [good.key]).problems == []
    assert len(verify(store, [bad.key]).problems) == 1


# ------------------------------------------------------------------------------------------ tree


def test_a_laid_out_run_has_every_tensor_as_a_file(committed, scratch, tmp_path):
    run = committed(steps=2)
    original = scratch(steps=2) / "dump"
    count = lay_out(run, tmp_path / "out")
    found = {p.relative_to(tmp_path / "out"): p for p in (tmp_path / "out").rglob("*.pt")}
    assert len(found) == 2 * 2 * 2
    for name, path in found.items():
        assert path.read_bytes() == (original / name).read_bytes()
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert len(files) == count
    assert not any(p.suffix == ".zip" for p in files)


def test_files_are_links_or_on_request_copies(committed, tmp_path):
    run = committed()
    name = "actor_update/step0/rank0/dump.json"
    lay_out(run, tmp_path / "links")
    lay_out(run, tmp_path / "copies", copy=True)
    assert (tmp_path / "links" / name).samefile(run.dump / name)
    assert not (tmp_path / "copies" / name).samefile(run.dump / name)
    (tmp_path / "copies" / name).write_text("mine to edit")


def test_key_data_may_have_the_guides_names(committed, tmp_path):
    run = committed()
    plain, guide = tmp_path / "plain", tmp_path / "guide"
    assert lay_out(run, plain) == lay_out(run, guide, guide=True)
    (array,) = plain.glob("data/responses/step0/rank0/micro_step0/*.npy")
    assert array.name == "responses.npy"
    drawn = guide / "data/responses/step0/rank0/micro_step0/response0.npy"
    assert drawn.read_bytes() == array.read_bytes()
    assert (guide / "actor_update/step0/rank0/dump.json").is_file()


def test_a_place_in_use_is_refused(committed, tmp_path):
    run = committed()
    (tmp_path / "out").mkdir()
    lay_out(run, tmp_path / "out")
    with pytest.raises(StoreError, match="exists and is not an empty directory"):
        lay_out(run, tmp_path / "out")


@pytest.mark.parametrize("place", ["", "out", "runs/out", "objects/sha256/out", "link/../runs/x"])
@pytest.mark.parametrize("write", ["tree", "export"])
def test_nothing_is_laid_out_or_exported_into_the_store(committed, store, place, write):
    run = committed()
    before = sorted(store.rglob("*"))
    with pytest.raises(StoreError, match="choose a place outside of it"):
        if write == "tree":
            lay_out(run, store / place)
        else:
            export(store, [run.key], store / place)
    assert sorted(store.rglob("*")) == before


def test_a_missing_file_leaves_nothing_behind(committed, tmp_path):
    run = committed()
    (run.dump / "configurations.json").unlink()
    with pytest.raises(StoreError, match="run `rlprobe store verify`"):
        lay_out(run, tmp_path / "out")
    assert not any(p.name.startswith((".out", "out")) for p in tmp_path.iterdir())


@pytest.mark.parametrize("backwards", [False, True])
def test_a_packed_file_never_overwrites_one_that_is_there(committed, tmp_path, store, backwards):
    run = committed()
    if backwards:  # a manifest from elsewhere may list its files in any order
        files = run.manifest.files[::-1]
        run = replace(run, manifest=run.manifest.model_copy(update={"files": files}))
    directory = run.dump / "actor_update" / "step0" / "rank0"
    large = next((directory / "dump_tensor_data").iterdir())
    (directory / "dump_tensor_data.zip").unlink()
    with zipfile.ZipFile(directory / "dump_tensor_data.zip", "w") as archive:
        archive.writestr(large.name, b"hostile")
    with pytest.raises(StoreError, match="twice"):
        lay_out(run, tmp_path / "out")
    assert large.read_bytes() != b"hostile"
    # verify still sees that the zip was exchanged, and nothing else
    assert [p.path.name for p in verify(store).problems] == ["dump_tensor_data.zip"]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", ".", ".."])
def test_a_zip_whose_names_leave_the_directory_is_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")
    with pytest.raises(StoreError, match="no plain file name"):
        list(packing.unpack(tmp_path / "x.zip"))


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", bytes(1 << 19))
    with pytest.raises(StoreError, match=r"claim more bytes|not stored as it is"):
        list(packing.unpack(tmp_path / "x.zip"))
    with zipfile.ZipFile(tmp_path / "y.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", os.urandom(100))
    with pytest.raises(StoreError, match="not stored as it is"):
        list(packing.unpack(tmp_path / "y.zip"))
    (tmp_path / "z.zip").write_bytes(b"PK nothing")
    with pytest.raises(StoreError, match="not a readable zip"):
        list(packing.unpack(tmp_path / "z.zip"))


def test_packing_the_same_files_gives_the_same_bytes(tmp_path):
    for number in range(20):
        (tmp_path / f"t{number}.pt").write_bytes(bytes([number]) * number * 7)
    files = sorted(tmp_path.glob("*.pt"))
    members = packing.pack(files, tmp_path / "a.zip")
    for file in files:
        os.utime(file, (0, 0))
    packing.pack(reversed(files), tmp_path / "b.zip")
    content = (tmp_path / "a.zip").read_bytes()
    assert (tmp_path / "b.zip").read_bytes() == content
    for member in members:
        assert (
            content[member.offset :][: member.stored.size] == (tmp_path / member.name).read_bytes()
        )
    assert dict(packing.unpack(tmp_path / "a.zip")) == {f.name: f.read_bytes() for f in files}


# ----------------------------------------------------------------------------------- command line


def rlprobe(*words) -> int:
    return main([str(word) for word in words])


def test_ls_show_and_verify_say_what_there_is(committed, store, capsys, tmp_path):
    run = committed(declared={"device": "npu"})
    record_alignment(store, "gpu-to-npu", [run.key])
    assert rlprobe("store", "ls", "--store", store, "--json", tmp_path / "ls.json") == 0
    line = capsys.readouterr().out
    assert run.key[:16] in line and "verl on npu" in line and "gpu-to-npu" in line
    assert json.loads((tmp_path / "ls.json").read_text())[0]["key"] == run.key
    assert rlprobe("store", "show", run.key[:8], "--store", store) == 0
    assert "actor_update" in capsys.readouterr().out
    assert rlprobe("store", "verify", "--store", store) == 0
    assert "all as they should be" in capsys.readouterr().out


def test_verify_exits_1_on_damage(committed, store, capsys):
    damage(Objects(store).path(committed().manifest.files[0].sha256))
    assert rlprobe("store", "verify", "--store", store) == 1
    assert ": 1 problem\n" in capsys.readouterr().out


def test_two_sites_hand_over_a_run(committed, store, tmp_path, capsys):
    run = committed()
    record_alignment(store, "cpu", [run.key, "0" * 64])
    there = tmp_path / "there"
    carried = tmp_path / "carried"
    assert rlprobe("store", "export", "--alignment", "cpu", "-o", carried, "--store", store) == 0
    digest = capsys.readouterr().out.split()[-1]
    assert rlprobe("store", "import", carried, "--digest", digest, "--store", there) == 0
    assert rlprobe("store", "gc", "--store", there) == 0
    assert rlprobe("store", "tree", run.key, tmp_path / "out", "--store", there) == 0
    assert (tmp_path / "out" / "actor_update" / "step0" / "rank0" / "dump.json").is_file()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["store", "show", "abcd"], 1, "no run abcd"),
        (["store", "export", "-o", "x"], 2, "say which runs"),
        (["store", "export", "--alignment", "no", "-o", "x"], 2, "records no alignment 'no'"),
        (["store", "import", "nowhere"], 1, "does not exist"),
        (["store", "gc", "--forget", "x", "--dry-run"], 2, "makes no sense"),
        (["store", "gc", "--forget", "x"], 1, "records no alignment 'x'"),
        (["store", "rm", "abcd"], 1, "no run abcd"),
    ],
)
def test_mistakes_get_one_clear_line(store, capsys, words, code, message):
    (store / "runs").mkdir(parents=True)
    assert rlprobe(*words, "--store", store) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_looking_for_an_object_by_what_is_no_digest_is_refused(store):
    with pytest.raises(StoreError, match="not a sha256 digest"):
        Objects(store).has(Stored("../../etc/passwd", 3))


ON_A_STORE = ("ls", "show abcd", "verify", "verify --repair", "gc", "gc --dry-run", "gc --forget x",
    "rm abcd", "export abcd -o OUT", "tree abcd OUT")  # fmt: skip


@pytest.mark.parametrize("words", ON_A_STORE)
@pytest.mark.parametrize("what", ["nothing", "file", "directory"])
def test_what_is_no_store_is_said_to_be_none_and_stays_as_it_is(tmp_path, capsys, words, what):
    place = tmp_path / "place"
    if what == "file":
        place.write_text("mine")
    elif what == "directory":
        (place / "photos").mkdir(parents=True)
    given = [str(tmp_path / "out") if word == "OUT" else word for word in words.split()]
    assert rlprobe("store", *given, "--store", place) == 1
    said = {"nothing": "does not exist", "file": "is a file", "directory": "holds no store"}[what]
    error = capsys.readouterr().err
    assert f"{place} {said}" in error and error.count("\n") == 1
    left = {"nothing": [], "file": ["place"], "directory": ["photos", "place"]}[what]
    assert sorted(path.name for path in tmp_path.rglob("*")) == left


def test_deleting_from_python_makes_no_store_either(tmp_path):
    for delete in (lambda: gc.collect(tmp_path / "no"), lambda: gc.remove(tmp_path / "no", "abcd")):
        with pytest.raises(StoreError, match="there is no store"):
            delete()
    assert list(tmp_path.iterdir()) == []
