"""An engine's experts against training's: what stands for what, by the order of calls."""

from __future__ import annotations

from typing import Any

import polars as pl

from rlprobe.compare.traininfer import fused

BLOCK = "model.layers.1.mlp"
FLOAT, IDS = "torch.float32", "torch.int32"


def records(*calls: tuple[str, str, list[tuple[str, str, str]]]) -> pl.DataFrame:
    """Tensors of calls in the order of execution: module, class, and (slot, index, dtype)."""
    rows = [
        (order, f"Module.{module}.{cls}.forward.0.{slot}.{index}", module, cls, slot, index, dtype,
         [3, 8])
        for order, (module, cls, slot, index, dtype) in enumerate(
            (module, cls, *tensor) for module, cls, tensors in calls for tensor in tensors
        )
    ]  # fmt: skip
    schema: dict[str, Any] = {
              "order": pl.Int64, "name": pl.String, "module": pl.String, "op": pl.String,
              "slot": pl.String, "index": pl.String, "dtype": pl.String,
              "shape": pl.List(pl.Int64)}  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


GATE = (f"{BLOCK}.gate", "GateLinear", [("input", "0", FLOAT), ("output", "0", FLOAT)])
SHARED_GATE = (f"{BLOCK}.shared_expert_gate", "ReplicatedLinear", [("output", "0", FLOAT)])
SHARED = (f"{BLOCK}.shared_expert", "Qwen2MoeMLP", [("input", "0", FLOAT), ("output", "0", FLOAT)])
EXPERTS = (
    f"{BLOCK}.experts",
    "MoERunner",
    [("input", "hidden_states", FLOAT), ("input", "router_logits", FLOAT), ("output", "0", FLOAT)],
)


def apart(table: pl.DataFrame) -> dict[str, str]:
    return {
        name.partition("mlp.")[2].replace(".forward.0", ""): why
        for name, why in fused.describe(table).apart.select("name", "why").iter_rows()
    }


def test_experts_with_shared_ones_in_one() -> None:
    table = records(GATE, SHARED_GATE, SHARED, EXPERTS)
    assert apart(table) == {
        "experts.MoERunner.input.router_logits": fused.CHOOSES,
        "experts.MoERunner.output.0": fused.SHARED,
        "shared_expert.Qwen2MoeMLP.output.0": fused.LET_THROUGH,
    }
    kept = fused.describe(table).records
    assert kept.filter(module=f"{BLOCK}.experts")["index"].to_list() == ["0"]
    assert kept.filter(module=f"{BLOCK}.gate").height == 2


def test_experts_alone_give_what_trainings_give() -> None:
    assert apart(records(GATE, EXPERTS)) == {"experts.MoERunner.input.router_logits": fused.CHOOSES}


def test_a_shared_expert_whose_gate_runs_after_it_gives_what_trainings_gives() -> None:
    assert not apart(records(GATE, SHARED, SHARED_GATE))


def test_experts_of_a_training_model_are_left_alone() -> None:
    own = (f"{BLOCK}.experts", "Qwen2MoeExperts",
           [("input", "0", FLOAT), ("input", "1", IDS), ("output", "0", FLOAT)])  # fmt: skip
    assert not apart(records(GATE, own, SHARED, SHARED_GATE))
