"""Sequences that ranks share: records of two ranks add up to those of one.

Megatron's plain layers refuse sequence and context parallelism, so that here small modules stand in
for them that lie in Megatron's packages by name, and get what a rank of Megatron's would get.
"""

from __future__ import annotations

import itertools
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from rlprobe.dumps import logical
from tests.unit.capture_helpers import UPDATE, recorder

WIDTH = 16
GENERATOR = np.random.default_rng(3)
SAMPLES = [GENERATOR.integers(1, 40, length) for length in (5, 9, 2)]
#: Each sample and its padding, of lengths that four pieces of each divide.
STARTS = [0, 8, 20, 24]


class ColumnParallelLinear(nn.Linear):
    """Takes a stretch of the sequence, gives its features of the whole."""

    gathered: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gathered)


class RowParallelLinear(nn.Linear):
    """Takes its features of the whole sequence, gives a stretch of the sum over ranks."""

    input_is_parallel = True
    skip_bias_add = True
    summed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.summed


class Mlp(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        each = 2 * WIDTH // ranks
        self.linear_fc1 = ColumnParallelLinear(WIDTH, each, bias=False)
        self.linear_fc2 = RowParallelLinear(each, WIDTH, bias=False)
        self._cut = slice(rank * each, (rank + 1) * each)

    def forward(self, x: Tensor, gathered: Tensor, cut: slice) -> Tensor:
        up, down = whole("up", 2 * WIDTH, WIDTH), whole("down", WIDTH, 2 * WIDTH)
        with torch.no_grad():
            self.linear_fc1.weight.copy_(up[self._cut])
        self.linear_fc1.gathered = gathered
        self.linear_fc2.summed = (torch.relu(gathered @ up.T) @ down.T)[cut]
        return self.linear_fc2(torch.relu(self.linear_fc1(x)))


class Layer(nn.Module):
    layer_number = 1

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp(rank, ranks)

    def forward(self, x: Tensor, every: Tensor, cut: slice) -> Tensor:
        return x + self.mlp(self.input_layernorm(x), self.input_layernorm.functional(every), cut)


class Norm(nn.LayerNorm):
    def functional(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias)


class GPTModel(nn.Module):
    """Of one rank; nothing in it mixes tokens, so that a rank needs no other's."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(gated_linear_unit=False, num_attention_heads=2)
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(40, WIDTH)
        self.embedding.word_embeddings.weight.data.copy_(whole("embedding", 40, WIDTH))
        self.decoder = nn.Module()
        layer = Layer(rank, ranks)
        layer.input_layernorm = Norm(WIDTH)
        self.decoder.layers = nn.ModuleList([layer])
        self.decoder.final_layernorm = nn.LayerNorm(WIDTH)
        self._rank, self._ranks = rank, ranks

    def forward(self, input_ids: Tensor, packed_seq_params: Any) -> Tensor:
        every = self.embedding.word_embeddings(input_ids).transpose(0, 1)
        each = len(every) // self._ranks
        cut = slice(self._rank * each, (self._rank + 1) * each)
        hidden = self.decoder.layers[0](every[cut], every, cut)
        return self.decoder.final_layernorm(hidden)


GPTModel.__module__ = "megatron.core.models.gpt.gpt_model"


def whole(name: str, *shape: int) -> Tensor:
    drawn = np.random.default_rng(sum(name.encode())).standard_normal(shape)
    return torch.from_numpy(drawn.astype(np.float32))


def row() -> tuple[Tensor, Tensor]:
    """The packed row of all samples, and which columns are a sample's."""
    ids, used = torch.zeros(STARTS[-1], dtype=torch.int64), torch.zeros(STARTS[-1])
    for sample, start in zip(SAMPLES, STARTS, strict=False):
        ids[start : start + len(sample)] = torch.from_numpy(sample)
        used[start : start + len(sample)] = 1
    return ids, used


def captured(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: Tensor | None = None,
    rank: int = 0,
    mode: str | None = None,
    **layout: Any,
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The records of one rank of a layout.

    Args:
        root: where the rank writes.
        monkeypatch: says what layout it is.
        columns: of the packed row, those that the rank has; None: all.
        rank: of the sequence-parallel ranks.
        mode: how Megatron says that context-parallel ranks divide the row.
        layout: as :mod:`rlprobe.capture.megatron_layout` has it.
    """
    for module in ("megatron_places", "fused_parameters"):
        monkeypatch.setattr(f"rlprobe.capture.{module}.layout", lambda chunks: layout)
    ids, used = row()
    if columns is not None:
        ids, used = ids[columns], used[columns]
    ranks = layout.get("tp", 1)
    model = GPTModel(rank, ranks)
    bounds = torch.tensor(STARTS)
    packed = types.SimpleNamespace(cu_seqlens_q_padded=bounds, cp_partition_mode=mode)
    capture = recorder(root, coordinate_sketch=True)
    with capture.stage(UPDATE, 0, 1, model) as scope:
        scope.micro_step(0)
        scope.tokens([np.asarray(sample, np.int64) for sample in SAMPLES])
        output = model(ids[None], packed)
        each = len(used) // ranks
        own = used[rank * each : (rank + 1) * each]
        (output.pow(3).sum(-1) * own[:, None]).sum().backward()
    table = logical.read(root / "side", {UPDATE})[UPDATE]
    return {(r["module"], r["direction"], r["slot"]): r for r in table.iter_rows(named=True)}


def zigzag(rank: int) -> Tensor:
    """Of each sample's four pieces, the rank's from the front and from the back."""
    columns: list[int] = []
    for start, end in itertools.pairwise(STARTS):
        piece = (end - start) // 4
        columns += range(start + rank * piece, start + (rank + 1) * piece)
        columns += range(end - (rank + 1) * piece, end - rank * piece)
    return torch.tensor(columns)


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Any, dict[str, Any]]:
    return captured(tmp_path / "one", monkeypatch)


def check_sum(one: dict[Any, dict[str, Any]], ranks: list[dict[Any, dict[str, Any]]]) -> None:
    """Distinct parts of the ranks' records add up to those of one."""
    for key, theirs in one.items():
        parts = {(r[key]["identity"], r[key]["first"]): r[key] for r in ranks if key in r}
        norm = np.sqrt(theirs["squares"])
        total = sum(np.array(part["sketch"]) for part in parts.values())
        assert np.allclose(total, theirs["sketch"], atol=5e-6 * norm), key
        squares = sum(part["squares"] for part in parts.values())
        assert squares == pytest.approx(theirs["squares"], rel=1e-5), key
        by_tokens = {part["identity"]: part["tokens"] for part in parts.values()}
        assert sum(by_tokens.values()) == theirs["tokens"] == 16, key
        identity = sum(int(tokens, 16) for tokens in by_tokens) % 2**64
        assert identity == int(theirs["identity"], 16), key


@pytest.mark.parametrize("mode", [None, "zigzag", "contiguous"])
def test_context_parallel_ranks_add_up(
    mode: str | None, one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = []
    for rank in (0, 1):
        columns = torch.arange(12 * rank, 12 * rank + 12) if mode == "contiguous" else zigzag(rank)
        ranks.append(captured(tmp_path / str(rank), monkeypatch, columns, mode=mode,
                              cp=2, cp_rank=rank))  # fmt: skip
    assert set(ranks[0]) == set(one)
    assert {record["tokens"] for record in ranks[0].values()} != {16}
    check_sum(one, ranks)


def test_sequence_parallel_ranks_add_up(
    one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [
        captured(tmp_path / str(rank), monkeypatch, rank=rank, tp=2, tp_rank=rank,
                 sequence_parallel=True)
        for rank in (0, 1)
    ]  # fmt: skip
    layer = "model.layers.0"
    # between the projections half of the sequence, and within them half of the features
    for rank, found in enumerate(ranks):
        norm = found[f"{layer}.input_layernorm", "forward", "output"]
        inside = found[f"{layer}.mlp.down_proj", "forward", "input"]
        assert norm["tokens"] < 16 and (norm["first"], norm["features"]) == (0, WIDTH)
        assert inside["tokens"] == 16 and inside["first"] == rank * WIDTH
    forward = {key: record for key, record in one.items() if key[1] == "forward"}
    check_sum(forward, ranks)
    backward = ("model.norm", "backward", "input"), ("model.norm", "backward", "output")
    check_sum({key: one[key] for key in backward}, ranks)


def test_a_row_that_ranks_do_not_divide_has_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.STARTS", [0, 7, 20, 24])
    assert not captured(tmp_path, monkeypatch, zigzag(0), cp=2)


def test_a_shifted_shard_is_seen(one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has the other rank's tokens is no part of the same whole."""
    ranks = [
        captured(tmp_path / str(rank), monkeypatch, zigzag(1 - rank), cp=2, cp_rank=rank)
        for rank in (0, 1)
    ]
    key = ("model.norm", "forward", "output")
    total = sum(np.array(found[key]["sketch"]) for found in ranks)
    apart = np.linalg.norm(total - np.array(one[key]["sketch"]))
    assert apart > 0.5 * np.sqrt(one[key]["squares"])
