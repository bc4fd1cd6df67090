"""Records of whole stages: the same in every layout of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from rlprobe.capture.megatron_places import MegatronPlaces
from rlprobe.dumps import logical
from rlprobe.errors import StoreError
from tests.unit.capture_helpers import UPDATE, Tiny, make, recorder

SAMPLES = [torch.randint(1, 40, (length,), generator=torch.Generator().manual_seed(length))
           for length in (5, 9, 7, 4)]  # fmt: skip
#: input_ids, attention_mask, position_ids of each micro-batch.
Given = tuple[Tensor, Tensor | None, Tensor | None]


class Model(Tiny):
    """Called as a Hugging Face model is."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        return super().forward(input_ids)


def padded(rows: list[int], width: int) -> Given:
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(rows):
        own = SAMPLES[sample]
        ids[row, width - len(own) :], mask[row, width - len(own) :] = own, 1
    return ids, mask, None


def packed(rows: list[int]) -> Given:
    own = [SAMPLES[row] for row in rows]
    positions = torch.cat([torch.arange(len(sample)) for sample in own])
    return torch.cat(own)[None], None, positions[None]


def loss(model: nn.Module, given: Given) -> Tensor:
    ids, mask, _ = given
    output = model(*given)
    used = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return output[used].square().sum()


def captured(root: Path, batches: list[Given], steps: int = 0, **options: Any) -> pl.DataFrame:
    """The logical records of an update over micro-batches; so many of them after a step."""
    model = make(Model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = recorder(root, coordinate_sketch=True, **options)
    with capture.stage(UPDATE, 0, 1, model, optimizer=optimizer) as scope:
        for number, given in enumerate(batches):
            if steps and number == len(batches) - steps:
                scope.gradients("grad_reduced")
                optimizer.step()
            scope.micro_step(number)
            loss(model, given).backward()
    table = logical.read(root / "side", {UPDATE})[UPDATE]
    return table.sort("module", "direction", "slot")


LAYOUTS = {
    "one row a micro-batch": [padded([row], 9) for row in range(4)],
    "another order": [padded([3, 1], 12), padded([0, 2], 9)],
    "packed": [packed([0, 1]), packed([2, 3])],
    "packed together": [packed([2, 0, 3, 1])],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    return captured(tmp_path_factory.mktemp("whole"), [padded([0, 1, 2, 3], 16)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_does_not_depend_on_the_layout(
    layout: str, whole: pl.DataFrame, tmp_path: Path
) -> None:
    found = captured(tmp_path, LAYOUTS[layout])
    same = ["module", "op", "direction", "slot", "dtype", "tokens", "count", "width", "identity"]
    assert found.select(same).equals(whole.select(same))
    assert set(found["tokens"]) == {25}
    for ours, theirs in zip(found.iter_rows(named=True), whole.iter_rows(named=True), strict=True):
        norm = np.sqrt(theirs["squares"])
        assert np.allclose(ours["sketch"], theirs["sketch"], atol=2e-6 * norm), ours["module"]
        assert np.sqrt(ours["squares"]) == pytest.approx(norm, rel=1e-5)
        for end in ("max", "min"):
            assert ours[end] == pytest.approx(theirs[end], rel=1e-4, abs=1e-6)


def test_every_module_has_what_it_takes_and_gives_and_their_gradients(whole: pl.DataFrame) -> None:
    slots = {("forward", "input"), ("forward", "output"), ("backward", "input"),
             ("backward", "output")}  # fmt: skip
    for module in ("layers.0", "layers.1.norm", "layers.0.down", "head"):
        own = whole.filter(pl.col("module") == module)
        assert set(own.select("direction", "slot").iter_rows()) == slots, module
    embedding = whole.filter(pl.col("module") == "embed")
    assert set(embedding["slot"]) == {"input", "output"}
    assert set(embedding.filter(pl.col("direction") == "forward")["slot"]) == {"output"}


def test_a_record_differs_as_much_as_the_tensors(whole: pl.DataFrame, tmp_path: Path) -> None:
    model = make(Model)
    with torch.no_grad():
        given = [model.layers[0].norm(model.embed(sample)) for sample in SAMPLES]
        size = torch.cat([model.layers[0].gate(hidden) for hidden in given]).norm()
    planted = model.layers[0].gate.register_forward_hook(lambda m, args, out: out * 1.01)
    with recorder(tmp_path, coordinate_sketch=True).stage(UPDATE, 0, 1, model):
        loss(model, padded([0, 1, 2, 3], 16))
    planted.remove()
    found = logical.read(tmp_path / "side", {UPDATE})[UPDATE]
    sketches = [
        np.asarray(
            table.filter(
                (pl.col("module") == "layers.0.gate")
                & (pl.col("direction") == "forward")
                & (pl.col("slot") == "output")
            )["sketch"][0]
        )
        for table in (whole, found)
    ]
    distance = np.linalg.norm(sketches[1] - sketches[0])
    assert distance == pytest.approx(0.01 * float(size), rel=0.2)


def test_what_runs_on_other_weights_is_not_added(whole: pl.DataFrame, tmp_path: Path) -> None:
    batches = [padded([0, 1, 2, 3], 16), padded([1, 2], 9)]
    found = captured(tmp_path, batches, steps=1)
    assert found.select("module", "tokens", "identity").equals(
        whole.select("module", "tokens", "identity")
    )
    assert set(found["calls"]) == {1}


def test_it_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    def gradients(watched: bool) -> list[Tensor]:
        model = make(Model)
        capture = recorder(tmp_path / str(watched), coordinate_sketch=watched)
        with capture.stage(UPDATE, 0, 1, model):
            loss(model, padded([0, 1, 2, 3], 16)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_tokens_that_nothing_tells_give_no_record(tmp_path: Path) -> None:
    model = make(Tiny)  # its argument has another name
    with recorder(tmp_path, coordinate_sketch=True).stage(UPDATE, 0, 1, model):
        model(torch.zeros(2, 3, dtype=torch.int64))
    assert logical.read(tmp_path / "side", {UPDATE})[UPDATE].is_empty()
    with np.load(tmp_path / f"side/logical/{UPDATE}-step0-rank0.npz") as arrays:
        assert arrays["skipped"] == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: arrays.pop("first"),
        lambda arrays: arrays.update(sketch=arrays["sketch"][:, :3]),
        lambda arrays: arrays.update(width=arrays["width"].astype(np.float32)),
        lambda arrays: arrays.update(count=arrays["count"][:-1]),
        lambda arrays: arrays.update(module=np.array([{}] * len(arrays["count"]))),
    ],
    ids=["lacks one", "other sketches", "other type", "shorter", "a pickle"],
)
def test_a_damaged_file_is_refused(damage: Any, whole: pl.DataFrame, tmp_path: Path) -> None:
    captured(tmp_path, [packed([0, 1])])
    path = tmp_path / f"side/logical/{UPDATE}-step0-rank0.npz"
    with np.load(path) as found:
        arrays = dict(found)
    damage(arrays)
    np.savez(path, **arrays)
    with pytest.raises(StoreError, match="records by coordinates"):
        logical.read(tmp_path / "side", {UPDATE})


@pytest.mark.parametrize(
    "damage",
    [
        {"sketch": [[0.0] * 5]},
        {"sketch": [[None] * 488]},
        {"identity": ["not hexadecimal!"]},
        {"width": [0]},
        {"features": [99]},
        {"first": [-1]},
        {"count": [0]},
        {"module": [None]},
    ],
    ids=str,
)
def test_a_table_from_elsewhere_is_checked(damage: dict[str, Any], whole: pl.DataFrame) -> None:
    assert logical.require(whole, "here").equals(whole)
    one = whole.head(1).with_columns(
        pl.Series(name, values, dtype=logical.SCHEMA[name]) for name, values in damage.items()
    )
    with pytest.raises(StoreError, match="1 of 2 rows are no records by coordinates"):
        logical.require(pl.concat([whole.head(1), one]), "here")


def test_a_file_of_no_captured_stage_is_refused(tmp_path: Path) -> None:
    captured(tmp_path, [packed([0, 1])])
    with pytest.raises(StoreError, match="has no records"):
        logical.read(tmp_path / "side", set())


# --- Megatron's places, by modules that stand in for its own


class ColumnParallelLinear(nn.Module):
    gather_output = False


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(nn.Module):
    input_is_parallel = True
    skip_bias_add = True
    bias: Tensor | None = None


class IdentityOp(nn.Module):
    pass


class Configured(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        known = {"gated_linear_unit": True, "num_attention_heads": 8, "num_query_groups": 4}
        self.config = type("Config", (), known | config)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes places of a rank of a layout."""

    def make(config: dict[str, Any] | None = None, **layout: Any) -> MegatronPlaces:
        monkeypatch.setattr("rlprobe.capture.megatron_places.layout", lambda chunks: layout)
        return MegatronPlaces([Configured(**(config or {}))])

    yield make


def of(found: Any) -> list[tuple[Any, ...]]:
    return [(piece.module, piece.first, piece.width, piece.features) for piece in found]


ATTENTION, MLP = "model.layers.3.self_attn", "model.layers.3.mlp"


def test_fused_queries_keys_and_values_are_apart_head_by_head(places: Any) -> None:
    # 4 groups of 2 queries, one key and one value, 2 features a head; the second of two ranks
    found = places(tp=2, tp_rank=1).pieces(
        f"{ATTENTION}.qkv_proj", ColumnParallelLinear(), "forward", "output", 16
    )
    assert of(found) == [
        (f"{ATTENTION}.q_proj", 8, 16, (0, 1, 2, 3, 8, 9, 10, 11)),
        (f"{ATTENTION}.k_proj", 4, 8, (4, 5, 12, 13)),
        (f"{ATTENTION}.v_proj", 4, 8, (6, 7, 14, 15)),
    ]


def test_gate_and_up_are_halves_of_each_rank(places: Any) -> None:
    found = places(tp=2, tp_rank=1).pieces(
        f"{MLP}.gate_up_proj", ColumnParallelLinear(), "backward", "output", 6
    )
    assert of(found) == [
        (f"{MLP}.gate_proj", 3, 6, (0, 1, 2)), (f"{MLP}.up_proj", 3, 6, (3, 4, 5)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "module", "direction", "slot", "expected"),
    [
        # what projections take is one tensor, and what they send back its gradient's sum
        (f"{MLP}.gate_up_proj", ColumnParallelLinear(), "forward", "input",
         [(f"{MLP}.gate_proj", 0, 4, None), (f"{MLP}.up_proj", 0, 4, None)]),
        (f"{MLP}.gate_up_proj", ColumnParallelLinear(), "backward", "input",
         [(f"{MLP}.gate_up_proj", 0, 4, None)]),
        # a norm that is fused takes it
        (f"{ATTENTION}.qkv_proj", TELayerNormColumnParallelLinear(), "forward", "input",
         [("model.layers.3.input_layernorm", 0, 4, None)]),
        (f"{MLP}.gate_up_proj", TELayerNormColumnParallelLinear(), "forward", "input",
         [("model.layers.3.post_attention_layernorm", 0, 4, None)]),
        (f"{MLP}.down_proj", RowParallelLinear(), "forward", "input",
         [(f"{MLP}.down_proj", 4, 8, None)]),
        (f"{MLP}.down_proj", RowParallelLinear(), "forward", "output",
         [(f"{MLP}.down_proj", 0, 4, None)]),
        ("lm_head", ColumnParallelLinear(), "forward", "output", [("lm_head", 4, 8, None)]),
        (f"{ATTENTION}.q_norm", nn.LayerNorm(4), "forward", "output",
         [(f"{ATTENTION}.q_norm", 4, 8, None)]),
        (f"{ATTENTION}.core_attention", nn.Module(), "forward", "output",
         [(f"{ATTENTION}.core_attention", 4, 8, None)]),
        # an expert is divided over ranks of its own: here over none
        (f"{MLP}.experts.5.gate_up_proj", ColumnParallelLinear(), "forward", "output",
         [(f"{MLP}.experts.5.gate_proj", 0, 2, (0, 1)),
          (f"{MLP}.experts.5.up_proj", 0, 2, (2, 3))]),
        (f"{MLP}.experts.5.down_proj", RowParallelLinear(), "forward", "input",
         [(f"{MLP}.experts.5.down_proj", 0, 4, None)]),
        # recorded by what sends tokens to experts
        (f"{MLP}.experts", nn.Module(), "forward", "output", []),
        # angles that are scaled by a factor of their own
        ("model.rotary_emb", nn.Module(), "forward", "output", []),
        ("model.layers.3", nn.Module(), "forward", "output", [("model.layers.3", 0, 4, None)]),
        # nothing is said of what is not known
        (f"{MLP}.experts.local_experts", nn.Module(), "forward", "output", []),
        (f"{ATTENTION}.q_norm", IdentityOp(), "forward", "output", []),
    ],
)  # fmt: skip
def test_each_kind_of_module_has_its_part(
    places: Any, path: str, module: nn.Module, direction: str, slot: str, expected: list[Any]
) -> None:
    found = places(tp=2, tp_rank=1).pieces(path, module, direction, slot, 4)
    assert of(found) == expected


def test_a_bias_that_is_added_outside_leaves_no_record(places: Any) -> None:
    row = RowParallelLinear()
    row.bias = torch.zeros(4)
    assert not places(tp=1).pieces(f"{MLP}.down_proj", row, "forward", "output", 4)


def test_a_group_of_heads_may_lie_on_several_ranks(places: Any) -> None:
    """Of fewer groups than ranks each rank has a stretch of the fused projection's features."""
    found = {}
    for rank in range(4):
        # 2 groups of 4 queries, a key and a value, 2 features a head: 24 features
        own = places({"num_query_groups": 2}, tp=4, tp_rank=rank)
        path = f"{ATTENTION}.qkv_proj"
        found[rank] = of(own.pieces(path, ColumnParallelLinear(), "forward", "output", 6))
        assert own.pieces(f"{ATTENTION}.q_norm", nn.LayerNorm(4), "forward", "output", 4)
        assert not own.pieces(f"{ATTENTION}.k_norm", nn.LayerNorm(4), "forward", "output", 4)
    q, k, v = (f"{ATTENTION}.{name}_proj" for name in "qkv")
    assert found == {
        0: [(q, 0, 16, (0, 1, 2, 3, 4, 5))],
        1: [(q, 6, 16, (0, 1)), (k, 0, 4, (2, 3)), (v, 0, 4, (4, 5))],
        2: [(q, 8, 16, (0, 1, 2, 3, 4, 5))],
        3: [(q, 14, 16, (0, 1)), (k, 2, 4, (2, 3)), (v, 2, 4, (4, 5))],
    }


def test_heads_that_groups_do_not_divide_are_not_guessed(places: Any) -> None:
    found = places({"num_query_groups": 3}, tp=2).pieces(
        f"{ATTENTION}.qkv_proj", ColumnParallelLinear(), "forward", "output", 12
    )
    assert not found


def test_cosines_are_recorded_in_the_format_that_they_are_made_in(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron hands out angles in fp32 and rounds their cosines; others hand out the cosines."""

    class RotaryEmbedding(nn.Module):
        def forward(self, given: Tensor, _: Tensor) -> Tensor:
            return torch.arange(20.0)[:, None] * torch.ones(20, 2)

    class Turning(Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.rotary_emb = RotaryEmbedding()

        def forward(self, input_ids: Tensor, *given: Any) -> Tensor:  # type: ignore[override]
            self.rotary_emb(torch.zeros(1), input_ids)
            return super().forward(input_ids, *given)

    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        own = places()
        own._compute = dtype
        monkeypatch.setattr(MegatronPlaces, "of", classmethod(lambda *_, own=own: own))
        capture = recorder(tmp_path / str(dtype), coordinate_sketch=True)
        model = make(Turning)
        with capture.stage(UPDATE, 0, 1, model):
            loss(model, padded([0, 1], 9)).backward()
        table = logical.read(tmp_path / str(dtype) / "side", {UPDATE})[UPDATE]
        rows = table.filter(pl.col("module") == "rotary_emb", pl.col("slot") == "output")
        found[str(dtype)] = rows.get_column("dtype").to_list()
    assert found == {"torch.bfloat16": ["torch.bfloat16"], "torch.float32": ["torch.float32"]}
