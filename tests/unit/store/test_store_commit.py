"""Does a run come out of scratch space whole, once, and the same wherever it was made?"""

import errno
import json
import os
import shutil
import stat

import numpy as np
import polars as pl
import pytest

from rlprobe import files
from rlprobe.dumps import token_sketches
from rlprobe.dumps.tensors.spans import spans
from rlprobe.errors import DumpError, StoreError
from rlprobe.store import parts
from rlprobe.store.commit import commit
from rlprobe.store.keys import run_key
from rlprobe.store.manifest import Manifest
from rlprobe.store.objects import Objects
from rlprobe.store.read import Run
from rlprobe.store.verify import verify


def declare(role="benchmark", **more):
    return {"role": role, "seed": 1, **more}


def total_bytes(store):
    return sum(stored.size for stored in Objects(store))


def test_the_tree_is_the_one_that_is_promised(committed):
    run = committed()
    found = {p.relative_to(run.path).as_posix() for p in run.path.rglob("*") if p.is_file()}
    rank = "dump/actor_update/step0/rank0"
    other = "dump/actor_compute_log_prob/step0/rank0"
    large = "dump_tensor_data/Module.model.layers.0.mlp.up_proj.Linear.forward.0.output.0.pt"
    files = ("dump.json", "stack.json", "construct.json", "dump_tensor_data.zip", large)
    assert found == {
        "manifest.json",
        *(f"{directory}/{name}" for directory in (rank, other) for name in files),
        "dump/data/responses/step0/rank0/micro_step0/responses.npy",
        "dump/data/responses/step0/rank0/micro_step0/responses.json",
        "dump/configurations.json",
        "records/actor_update.parquet",
        "records/actor_compute_log_prob.parquet",
        "rollouts/step0.h5",
        "metrics.jsonl",
        "weights.parquet",
        "mock_proof.json",
        "environment.json",
        "tensors.parquet",
    }
    assert found - {"manifest.json"} == {file.path for file in run.manifest.files}


def test_the_manifest_says_what_was_captured(committed):
    manifest = committed(steps=2, ranks=2).manifest
    stage = manifest.stages["actor_update"]
    assert (stage.state, stage.steps, stage.ranks, stage.records) == ("captured", [0, 1], [0, 1], 8)
    assert list(manifest.stages) == ["actor_compute_log_prob", "actor_update"]
    assert (manifest.first_step, manifest.steps) == (1, [0, 1])
    assert [(p.role, p.rank, p.world_size, p.dp) for p in manifest.layout] == [
        ("actor", 0, 2, 2),
        ("actor", 1, 2, 2),
    ]
    assert manifest.recorded.rollouts["0"].startswith("sha256:")


def test_a_replay_marks_generation_as_replayed_and_names_its_parent(committed):
    origin = committed()
    replay = committed("target", declared={"replay_of": origin.key}, rollouts=False)
    assert replay.manifest.stages["actor_generate_sequences"].state == "replayed"
    assert replay.manifest.parents == [origin.key]
    with pytest.raises(StoreError, match=r"actor_generate_sequences was replayed; captured: actor"):
        replay.records("actor_generate_sequences")


def test_facts_about_the_machine_are_beside_not_inside(committed):
    run = committed(where="/mnt/gpu-site")
    for file in run.manifest.files:
        if file.path != "environment.json":
            assert b"/mnt/gpu-site" not in (run.path / file.path).read_bytes(), file.path
    removed = run.manifest.volatile["dump"]
    assert removed["<path-1>"] == {
        "/mnt/gpu-site/recipe": ["actor_compute_log_prob/step0/rank0", "actor_update/step0/rank0"]
    }
    assert "/mnt/gpu-site/dump_tensor_data" in removed["dump_data_dir"]


def test_the_same_run_made_elsewhere_costs_no_object_bytes(committed, store):
    committed(where="/home/a")
    before = total_bytes(store)
    committed("repeat", where="/somewhere/else")
    assert total_bytes(store) == before


def test_files_of_two_equal_runs_are_one_file(committed):
    a, b = committed(), committed("repeat")
    for file in a.manifest.files:
        assert (a.path / file.path).samefile(b.path / file.path)


def test_committing_again_changes_nothing(scratch, store):
    declared = declare()
    key = run_key(declared)
    place = scratch()
    first = commit(place, store, key, declared).read_bytes()
    assert commit(place, store, key, declared).read_bytes() == first
    assert verify(store).problems == []


def test_objects_are_read_only_and_scratch_is_left_as_it_was(scratch, store):
    place = scratch()
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    commit(place, store, run_key(declare()), declare())
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before
    objects = Objects(store)
    modes = {stat.S_IMODE(objects.path(o.sha256).stat().st_mode) for o in objects}
    assert modes == {0o444}


def test_deleting_scratch_does_not_hurt_the_store(scratch, store):
    place = scratch()
    commit(place, store, run_key(declare()), declare())
    shutil.rmtree(place)
    assert verify(store).problems == []


def test_an_empty_directory_that_snakemake_made_gives_way(scratch, store):
    key = run_key(declare())
    (store / "runs" / key).mkdir(parents=True)
    commit(scratch(), store, key, declare())
    assert verify(store).problems == []


@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_links_are_refused_files_are_copied(committed, store, monkeypatch, refusal):
    def refuse(*_args, **_kwargs):
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", refuse)
    run = committed()
    assert verify(store).problems == []
    assert all((run.path / file.path).stat().st_nlink == 1 for file in run.manifest.files)


def test_another_error_of_the_file_system_is_not_taken_for_a_refusal(committed, monkeypatch, store):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        committed()
    assert not any((store / "runs").glob("*/manifest.json"))


# ------------------------------------------------------------------------------------- the content


def test_records_name_the_objects_of_their_tensors_packed_or_not(committed):
    run = committed()
    table = pl.read_parquet(run.records("actor_update"))
    found = spans(run.path, "actor_update/step0/rank0")
    assert len(found) == 2
    for name, digest in table.select("data_name", "data").rows():
        span = found[name]
        assert span.digest == digest
        content = span.file.read_bytes()[span.offset : span.offset + span.size]
        assert content.startswith(b"PK\x03\x04")
        scratch_name = name.rpartition("/")[2]
        assert scratch_name == name
    assert {span.file.suffix for span in found.values()} == {".zip", ".pt"}
    assert all(span.offset % 64 == 0 for span in found.values())


def test_a_place_outside_its_file_is_refused(committed, tmp_path):
    run = committed()
    table = pl.read_parquet(run.path / "tensors.parquet")
    fake = tmp_path / "run"
    shutil.copytree(run.path / "dump", fake / "dump")
    table.with_columns(size=pl.lit(1 << 40, pl.Int64)).write_parquet(fake / "tensors.parquet")
    with pytest.raises(StoreError, match="said to lie outside"):
        spans(fake, "actor_update/step0/rank0")
    table.with_columns(container=pl.lit("../../x")).write_parquet(fake / "tensors.parquet")
    with pytest.raises(StoreError, match="not a plain relative path"):
        spans(fake, "actor_update/step0/rank0")


def test_stacks_in_records_are_the_canonical_ones(committed):
    run = committed(where="/mnt/x")
    stacks = pl.read_parquet(run.records("actor_update"))["stack"]
    assert stacks.str.contains("<site-packages>/torch", literal=True).all()


def test_weights_of_all_processes_are_one_table(committed):
    weights = committed(ranks=2).weights()
    assert dict(weights.schema) == parts.WEIGHTS
    assert weights["rank"].to_list() == [0, 0, 1, 1]


def test_equal_weights_and_samples_are_seen_in_the_manifest_alone(committed):
    a = committed().manifest.recorded
    b = committed("repeat", ranks=2).manifest.recorded
    c = committed("target", seed=1).manifest.recorded
    assert a.weights == b.weights != c.weights
    assert a.samples != b.samples


NAME = "Module.model.layers.0.mlp.up_proj.Linear.forward.0.output.0"


def write_token_sketches(place, file="actor_update-step0-rank0.npz", **other):
    arrays = {
        "names": np.array([NAME]),
        "name": np.zeros(4, dtype=np.int32),
        "micro_step": np.zeros(4, dtype=np.int32),
        "sample": np.array([0, 0, 1, 1], dtype=np.int32),
        "token": np.array([0, 1, 0, 1], dtype=np.int32),
        "sketch": np.arange(68, dtype=np.float32).reshape(4, 17),
        "k": np.int32(17),
        "left_out": np.int64(5),
        **other,
    }
    (place / "side" / "token_sketches").mkdir(exist_ok=True)
    np.savez(place / "side" / "token_sketches" / file, **arrays)
    return place


def test_token_sketches_are_joined_to_their_records(scratch, committed):
    run = committed(scratch_at=write_token_sketches(scratch()))
    table = run.token_sketches("actor_update")
    assert dict(table.schema) == token_sketches.SCHEMA
    records = pl.read_parquet(run.records("actor_update"))
    (order,) = records.filter(pl.col("name") == NAME)["order"]
    assert table["order"].to_list() == [order] * 4
    assert table["token"].to_list() == [0, 1, 0, 1]
    assert table["sketch"].to_list()[1] == list(range(17, 34))
    found = run.manifest.token_sketches["actor_update"]
    assert (found.k, found.left_out) == (17, 5)
    assert run.token_sketches("actor_compute_log_prob") is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"names": np.array([print], dtype=object)}, "not a file of token sketches"),
        ({"name": np.array([0, 0, 0, 1], dtype=np.int32)}, "do not fit together"),
        ({"name": np.array([0, 0, 0, -1], dtype=np.int32)}, "do not fit together"),
        ({"sketch": np.zeros((4, 16), dtype=np.float32)}, "do not fit together"),
        ({"token": np.zeros(3, dtype=np.int32)}, "do not fit together"),
        ({"file": "critic_update-step0-rank0.npz"}, "stage critic_update has no records"),
        ({"file": "x.npz"}, "expected files named"),
    ],
)
def test_token_sketches_that_do_not_fit_are_refused(scratch, store, other, message):
    refused(store, write_token_sketches(scratch(), **other), message)


def test_environment_and_metrics_come_back(committed):
    run = committed()
    assert run.environment() == {"actor-rank0": {"torch": "2.13.0", "threads": {"intra_op": 2}}}
    assert run.metrics()[0]["metrics"] == {"loss": 0.5}
    assert run.mock_proof()[0]["role"] == "actor"
    assert list(run.rollouts) == [0]


def test_a_single_process_without_rank_is_rank_0(committed, store):
    ranked = committed()
    before = total_bytes(store)
    by_pid = committed("repeat", rank_name="proc{rank}77")
    assert (by_pid.dump / "actor_update" / "step0" / "rank0" / "dump.json").is_file()
    assert total_bytes(store) == before
    assert [f.path for f in by_pid.manifest.files] == [f.path for f in ranked.manifest.files]


def test_slime_keeps_its_directories_and_gets_canonical_records(committed):
    run = committed(stages=("old_log_prob", "actor_train"))
    assert (run.dump / "old_log_prob" / "step0" / "rank0" / "dump.json").is_file()
    assert run.records("actor_compute_log_prob").is_file()
    assert list(run.manifest.stages) == ["actor_compute_log_prob", "actor_update"]


# ------------------------------------------------------------------------------------- what is bad


def refused(store, place, message, declared=None, error=StoreError):
    declared = declared or declare()
    with pytest.raises(error, match=message):
        commit(place, store, run_key(declared), declared)
    assert not any((store / "runs").glob("*/manifest.json"))
    assert list((store / "tmp").glob("*")) == []


def test_a_run_that_left_nothing_is_not_committed(store, tmp_path):
    (tmp_path / "scratch" / "dump").mkdir(parents=True)
    refused(store, tmp_path / "scratch", "is empty: nothing was captured")
    with pytest.raises(StoreError, match="left nothing to commit"):
        commit(tmp_path / "nowhere", store, run_key(declare()), declare())


def test_a_key_that_is_not_the_declaration_s_is_refused(scratch, store):
    with pytest.raises(StoreError, match="what is declared does not give the key"):
        commit(scratch(), store, "0" * 64, declare())
    assert not any((store / "runs").glob("*"))


def test_two_processes_without_rank_cannot_be_told_apart(scratch, store):
    place = scratch(ranks=2, rank_name="proc{rank}77")
    refused(store, place, "nothing says which is which")


def test_a_stage_under_two_names_is_refused(scratch, store):
    place = scratch(stages=("old_log_prob", "actor_compute_log_prob"))
    refused(store, place, "holds stage actor_compute_log_prob under two names")


def test_a_link_in_the_dump_is_not_followed(scratch, store):
    place = scratch()
    (place / "dump" / "data" / "x.json").symlink_to("/etc/passwd")
    refused(store, place, "is a link or device")


def test_a_capture_that_failed_half_way_is_not_committed(scratch, store):
    place = scratch()
    (place / "dump" / "actor_update" / "step0" / "rank0" / "dump.json.partial").touch()
    refused(store, place, "capture failed while it wrote this file")


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("dump/actor_update/step0/rank0/dump.json", b"{", DumpError, r"dump\.json"),
        ("dump/actor_update/step0/rank0/dump.json", b"\xff", DumpError, "not UTF-8"),
        ("dump/actor_update/step0/rank0/stack.json", b"[1]", DumpError, "not an msprobe stack"),
        ("side/parts/weights/actor-rank0.jsonl", b'{"step": 0', StoreError, "line 1: .*not JSON"),
        (
            "side/parts/weights/actor-rank0.jsonl",
            b'{"step": 0}',
            StoreError,
            "not a record of a weight",
        ),
        ("side/parts/samples/actor-rank0.jsonl", b'{"step": 0}', StoreError, "not a record of sam"),
        ("side/parts/samples/actor-rank0.jsonl", b"[]", StoreError, "a mapping is expected"),
        ("side/parts/samples/x.jsonl", b"", StoreError, "expected files named"),
        ("side/parts/first_step.json", b"{}", StoreError, "first_step is None"),
        ("side/parts/layout/actor-rank0.json", b'{"role": 3}', StoreError, "cannot commit"),
    ],
)
def test_a_damaged_part_is_named_and_nothing_published(
    scratch, store, file, content, error, message
):
    place = scratch()
    (place / file).write_bytes(content)
    refused(store, place, message, error=error)


def test_a_weights_record_of_another_type_is_refused(scratch, store):
    place = scratch()
    file = place / "side" / "parts" / "weights" / "actor-rank0.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    file.write_text(json.dumps({**row, "shape": "all of it"}))
    refused(store, place, r"line 1 is not a record of a weight: Expected `array`, got `str`")


def test_weights_that_are_not_finite_and_where_shards_lie_are_kept(scratch, store):
    place = scratch()
    file = place / "side" / "parts" / "weights" / "actor-rank0.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    file.write_text(json.dumps({**row, "norm": float("nan"), "offset": [[0, 2]], "sketch": None}))
    commit(place, store, run_key(declare()), declare())
    weights = Run.open(store, run_key(declare())).weights()
    assert weights["norm"].is_nan().all()
    assert weights["offset"].to_list() == ["[[0,2]]"]


def test_a_file_that_changes_while_it_is_stored_is_refused(tmp_path, monkeypatch):
    path, store = tmp_path / "x", tmp_path / "store"
    path.write_bytes(b"before")
    objects = Objects(store, tmp_path)
    real = files.digest

    def racing(found):
        result = real(found)
        path.write_bytes(b"after.")
        return result

    monkeypatch.setattr("rlprobe.store.objects.digest", racing)
    with pytest.raises(StoreError, match="changed while it was stored"):
        objects.put_file(path)
    assert list(objects) == []


# -------------------------------------------------------------------------------------- manifests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.update(format=2),
            "made by a newer rlprobe: its format is 2",
        ),
        (lambda m: m.update(key="x"), "key: String should match"),
        (lambda m: m.update(seed=3), "seed: Extra inputs are not permitted"),
        (lambda m: m["declared"].update(seed=2), "does not give the key"),
        (lambda m: m["files"][0].update(path="../x"), "not a plain relative path"),
        (lambda m: m["files"][0].update(path="/etc/passwd"), "not a plain relative path"),
        (lambda m: m["files"][0].update(path="dump//x"), "not a plain relative path"),
        (lambda m: m["files"][0].update(path="dump/a\nb"), "not a plain relative path"),
        (lambda m: m["files"][0].update(path="dump/\ud800"), "is half of a pair"),
        (lambda m: m["files"][0].update(path="manifest.json"), "has no place in a run"),
        (lambda m: m["files"][0].update(path="elsewhere/x"), "has no place in a run"),
        (lambda m: m["files"][0].update(path=m["files"][1]["path"]), "occurs twice"),
        (lambda m: m["files"][0].update(path=m["files"][1]["path"] + "/x"), "file and a directory"),
        (lambda m: m["files"][0].update(size=-1), "files.0.size"),
        (lambda m: m["files"][0].update(size="1"), "files.0.size"),
        (lambda m: m["stages"].update(other={"state": "captured"}), "unknown stage 'other'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(committed, change, message):
    value = json.loads(committed().manifest.to_bytes())
    change(value)
    with pytest.raises(StoreError, match=message):
        Manifest.from_bytes(json.dumps(value).encode(), "manifest.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(StoreError, match=r"manifest\.json"):
        Manifest.from_bytes(data, "manifest.json")


def test_a_manifest_comes_back_as_it_was(committed):
    manifest = committed().manifest
    assert Manifest.from_bytes(manifest.to_bytes(), "x") == manifest
