"""Is a stage directory, however its processes are called, one table?"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from rlprobe.dumps import records
from rlprobe.errors import DumpError, StoreError
from rlprobe.logical.wrappers import normalise_class, normalise_path
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor

ONE = {"Functional.linear.0.forward": call([tensor()], [tensor()])}


def test_steps_and_ranks_in_numerical_order(tmp_path: Path) -> None:
    for step in (10, 2):
        for rank in (1, 0, 11):
            dumps.write(tmp_path / f"step{step}/rank{rank}", ONE)
    frame = records.build(tmp_path, "actor_update")
    pairs = frame.select("step", "rank").unique(maintain_order=True).rows()
    assert pairs == [(s, r) for s in (2, 10) for r in (0, 1, 11)]
    assert frame.columns == list(records.SCHEMA)


def test_a_lone_proc_directory_is_rank_0(tmp_path: Path) -> None:
    dumps.write(tmp_path / "step0/proc90210", ONE)
    assert records.build(tmp_path, "x")["rank"].unique().to_list() == [0]


def test_debug_records_follow_the_dumps(tmp_path: Path) -> None:
    place = tmp_path / "step0/rank0"
    dumps.write(place, ONE)
    dumps.write(place, {"fc.weight.grad.0.debug": tensor()}, name="debug.json")
    frame = records.build(tmp_path, "x")
    assert frame["order"].to_list() == [0, 1, 2]
    assert frame["slot"].to_list() == ["input", "output", "grad"]


def test_stacks_and_stored_tensors_are_joined(tmp_path: Path) -> None:
    place = tmp_path / "step0/rank0"
    name = "Functional.linear.0.forward.output.0.pt"
    data = {"Functional.linear.0.forward": call([tensor()], [tensor(data_name=name)])}
    dumps.write(place, data, stack=True)
    digest = "sha256:" + "1" * 64
    objects = {f"step0/rank0/dump_tensor_data/{name}": digest}
    frame = records.build(tmp_path, "x", objects=objects)
    assert frame["data"].to_list() == [None, digest]
    assert frame["stack"][0].startswith("File model.py, line 1")
    assert records.build(tmp_path, "x", stacks=False)["stack"].null_count() == 2


def test_rank_and_proc_directories_together_are_refused(tmp_path: Path) -> None:
    dumps.write(tmp_path / "step0/rank0", ONE)
    dumps.write(tmp_path / "step0/proc1", ONE)
    with pytest.raises(DumpError, match="rank and proc"):
        records.build(tmp_path, "x")


def test_an_empty_stage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step0").mkdir()
    with pytest.raises(DumpError, match="was anything captured"):
        records.build(tmp_path, "actor_update")


@pytest.mark.parametrize("text", ["[]", '{"0": 3}', '{"0": [["a"], 5]}', "{"])
def test_a_damaged_stack_file_is_named(tmp_path: Path, text: str) -> None:
    dumps.write(tmp_path / "step0/rank0", ONE)
    (tmp_path / "step0/rank0/stack.json").write_text(text)
    with pytest.raises(DumpError, match="stack file"):
        records.build(tmp_path, "x")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    benchmark, _ = dumps.random_pair(2, 30)
    dumps.write(tmp_path / "step0/rank0", benchmark, stack=True)
    frame = records.build(tmp_path, "x")
    records.write(frame, tmp_path / "x.parquet")
    assert records.read(tmp_path / "x.parquet").equals(frame)
    assert records.read(tmp_path / "x.parquet", ["name", "max"]).columns == ["name", "max"]


def test_a_table_of_another_version_is_refused(tmp_path: Path) -> None:
    pl.DataFrame({"name": ["a"]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(StoreError, match="another version"):
        records.scan(tmp_path / "x.parquet")


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(StoreError, match="not a readable record table"):
        records.scan(tmp_path / "x.parquet")
    with pytest.raises(StoreError, match="not a readable record table"):
        records.scan(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module.model.layers.0", "model.layers.0"),
        ("module.module.decoder", "decoder"),
        ("_orig_mod.model", "model"),
        ("_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp", "model.layers.1.mlp"),
        ("model._checkpoint_wrapped_module.mlp", "model.mlp"),
        ("base_model.model.model.layers.0.q_proj.base_layer", "model.layers.0.q_proj"),
        (
            "base_model.model.model.layers.0.q_proj.lora_A.default",
            "model.layers.0.q_proj.lora_A.default",
        ),
        ("0.module.decoder", "0.decoder"),
        ("model.module.inner", "model.module.inner"),
        ("module", ""),
        ("", ""),
    ],
)
def test_wrappers_leave_the_path(wrapped: str, plain: str) -> None:
    assert normalise_path(wrapped) == plain
    assert normalise_path(plain) == plain


def test_fsdp2_classes() -> None:
    assert normalise_class("FSDPQwen2DecoderLayer") == "Qwen2DecoderLayer"
    assert normalise_class("FullyShardedDataParallel") == "FullyShardedDataParallel"


def test_the_dump_file_in_the_test_is_what_json_writes(tmp_path: Path) -> None:
    """Bare tokens: what the reader has to cope with is what Python's json really writes."""
    text = dumps.write(tmp_path, {"F.f.0.forward": call([tensor((float("nan"),) * 4)], [])})
    assert "NaN" in text.read_text() and json.loads(text.read_text())
