"""What an engine fuses, pads or packs: is it compared as what training has, or said not to be?"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch

from rlprobe.compare.traininfer import fused, parameters
from tests.unit.train_infer_dumps import HIDDEN, Batch, engine, hugging_face, save, with_weights
from tests.unit.train_infer_runs import (
    GENERATE,
    PROMPTS,
    ROUNDING,
    TRAINING,
    WHOLE,
    compare,
    names,
    train,
)

SECOND = "Module.model.layers.1"


@pytest.mark.parametrize(
    ("call", "slot", "index", "seen"),
    [
        (f"{SECOND}.Qwen2DecoderLayer", 0, 1, "layers.1.input.0"),
        (f"{SECOND}.Qwen2DecoderLayer", 0, 2, "layers.1.input.0"),
        (f"{SECOND}.Qwen2DecoderLayer", 1, 1, "layers.1.output.0"),
        (f"{SECOND}.input_layernorm.RMSNorm", 0, 1, "layers.1.input_layernorm.input.0"),
        (f"{SECOND}.post_attention_layernorm.RMSNorm", 0, 0,
         "layers.1.post_attention_layernorm.input.0"),
        (f"{SECOND}.mlp.down_proj.RowParallelLinear", 0, 0, "layers.1.mlp.down_proj.input.0"),
    ],
)  # fmt: skip
def test_each_half_of_a_residual_pair_counts(
    tmp_path: Path, call: str, slot: int, index: int, seen: str
) -> None:
    train(tmp_path, "padded")
    calls = engine(Batch(PROMPTS, {}), 0)
    calls[f"{call}.forward.0"][slot][index] = calls[f"{call}.forward.0"][slot][index] * 1.01
    save(tmp_path / GENERATE / "step0/rank0", calls)
    table, _ = compare(tmp_path)
    assert names(table.filter(pl.col("error") > ROUNDING)) == {seen}


def test_what_is_fused_otherwise_is_not_compared_and_says_where_it_is(tmp_path: Path) -> None:
    train(tmp_path, "padded")
    save(tmp_path / GENERATE / "step0/rank0", engine(Batch(PROMPTS, {}), 0))
    table, summary = compare(tmp_path)
    gated = table.filter(op="SiluAndMul")
    assert gated.height == 4 and set(gated["status"]) == {"benchmark_only"}
    assert set(gated["reason"]) == {fused.GATED}
    streams = table.filter(reason=fused.STREAM)
    assert names(streams.filter(slot="output")) == {
        "layers.0.output.1", "layers.1.output.1", "layers.1.input_layernorm.output.1",
        "layers.0.post_attention_layernorm.output.1", "layers.1.post_attention_layernorm.output.1",
    }  # fmt: skip
    assert any(
        note == "recorded in training only, and not compared: model.rotary_emb, "
        "model.layers.*.mlp.act_fn"
        for note in summary["notes"]
    )


@pytest.mark.parametrize("cls", ["GeluAndMul", "MulAndSilu", "SwigluOAIAndMul"])
def test_relatives_of_a_gated_activation_stand_apart(cls: str) -> None:
    name = f"Module.model.layers.0.mlp.act_fn.{cls}.forward.0"
    described = fused.describe(records((f"{name}.input.0", [3, 16]), (f"{name}.output.0", [3, 8])))
    assert described.records.is_empty() and set(described.apart["why"]) == {fused.GATED}


@pytest.mark.parametrize(
    "given",
    [
        # a norm of heads and an activation give one tensor; attention two of other shapes
        [("q_norm.RMSNorm", "input.0", 8), ("q_norm.RMSNorm", "output.0", 8)],
        [("act.SiLU", "input.0", 8), ("act.SiLU", "output.0", 8)],
        [("attn.Attention", "input.0", 8), ("attn.Attention", "output.0", 8),
         ("attn.Attention", "output.1", 8)],
        [("norm.LayerNorm", "input.0", 8), ("norm.LayerNorm", "output.0", 8),
         ("norm.LayerNorm", "output.1", 1)],
    ],
)  # fmt: skip
def test_what_is_no_residual_pair_stays_as_it_is(given: list[tuple[str, str, int]]) -> None:
    rows = records(
        *(
            (f"Module.model.layers.0.{module}.forward.0.{slot}", [3, width])
            for module, slot, width in given
        )
    )
    described = fused.describe(rows)
    assert described.records.equals(rows) and not described.addends and not described.renamed


def records(*rows: tuple[str, list[int]]) -> pl.DataFrame:
    """Records of float tensors by full name and shape."""
    found = []
    for order, (name, shape) in enumerate(rows):
        module, op, _, _, slot, index = name.removeprefix("Module.").rsplit(".", 5)
        found.append((order, name, module, op, slot, index, "torch.float32", shape))
    columns = ["order", "name", "module", "op", "slot", "index", "dtype", "shape"]
    return pl.DataFrame(found, schema=columns, orient="row")


@pytest.mark.parametrize(("held", "padded"), [(50, False), (64, True), (128, True)])
def test_a_padded_vocabulary_is_compared_where_it_is_one(
    tmp_path: Path, held: int, padded: bool
) -> None:
    table = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(3))
    name = "Module.model.embed_tokens.{}.forward.0"
    trainer, calls = hugging_face(Batch(WHOLE, {}), 0), engine(Batch(PROMPTS, {}), 0)
    trainer[name.format("Embedding")] += ({"weight": table},)
    own = torch.cat([table, torch.zeros(held - 50, HIDDEN)])
    own[7] *= 1.01
    calls[name.format("VocabParallelEmbedding")] += ({"weight": own},)
    save(tmp_path / TRAINING / "step0/rank0", trainer)
    save(tmp_path / GENERATE / "step0/rank0", calls)
    (row,) = compare(tmp_path)[0].filter(slot="parameters").iter_rows(named=True)
    assert row["status"] == "matched" and row["error_kind"] == "tensor"
    expected = float(table[7].norm() * 0.01 / table.norm())
    assert row["error"] == pytest.approx(expected, rel=1e-3)
    assert (row["reason"] or "").startswith("50 rows are compared") == padded


def test_a_weight_that_was_packed_is_said_to_be(tmp_path: Path) -> None:
    trainer = with_weights(hugging_face(Batch(WHOLE, {}), 0))
    calls = engine(Batch(PROMPTS, {}), 0)
    name = "Module.model.layers.1.mlp.down_proj.RowParallelLinear.forward.0"
    calls[name] += ({"weight": torch.zeros(0)},)
    save(tmp_path / TRAINING / "step0/rank0", trainer)
    save(tmp_path / GENERATE / "step0/rank0", calls)
    table, _ = compare(tmp_path)
    (row,) = table.filter(name=f"{name}.parameters.weight").iter_rows(named=True)
    assert row["status"] == "shape" and row["reason"] == parameters.PACKED and row["error"] is None


def test_token_ids_of_other_integers_are_the_same(tmp_path: Path) -> None:
    train(tmp_path, "padded")
    calls = engine(Batch(PROMPTS, {}), 0)
    name = "Module.model.embed_tokens.VocabParallelEmbedding.forward.0"
    calls[name] = ([calls[name][0][0].to(torch.int32)], calls[name][1])
    save(tmp_path / GENERATE / "step0/rank0", calls)
    (row,) = compare(tmp_path)[0].filter(name=f"{name}.input.0").iter_rows(named=True)
    assert row["status"] == "matched" and row["error"] == 0
