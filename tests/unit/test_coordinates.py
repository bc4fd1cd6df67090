"""Sketches by coordinates: the same however tokens and features are divided."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest

from rlprobe import coordinates
from rlprobe.sketch import deviation

pytest.importorskip("torch")
import torch

from rlprobe.capture.light.coordinates import Batch, Grid, SequenceShards, grid_of

CPU = torch.device("cpu")
GENERATOR = np.random.default_rng(0)
SAMPLES = [GENERATOR.integers(0, 99, length) for length in (5, 9, 13)]
KEYS = [coordinates.token_keys(sample) for sample in SAMPLES]
TOKENS = sum(map(len, SAMPLES))


def values(width: int) -> np.ndarray:
    return GENERATOR.standard_normal((TOKENS, width)).astype(np.float32)


@pytest.mark.parametrize("width", [1, 8, 64, 99, 488, 1000])
def test_torch_and_the_reference_agree(width: int) -> None:
    x = values(width)
    batch = Batch(SAMPLES, Grid(1, TOKENS, None), CPU)
    found = batch.sketch(torch.from_numpy(x), 0, width).numpy()
    expected = coordinates.sketch(x, np.concatenate(KEYS))
    assert found.shape == (coordinates.groups(width), 61)
    assert np.allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("width", [64, 99])
def test_parts_of_any_layout_add_up(width: int) -> None:
    x = values(width)
    whole = coordinates.sketch(x, np.concatenate(KEYS))
    starts = np.cumsum([0, *map(len, SAMPLES)])
    rows = [x[a:b] for a, b in itertools.pairwise(starts)]
    # micro-batches and ranks, in another order
    assert np.allclose(
        sum(coordinates.sketch(rows[i], KEYS[i]) for i in (2, 0, 1)), whole, atol=1e-12
    )
    # tensor-parallel shards, even ones and odd ones
    for cuts in ([0, width // 2, width], [0, 3, width]):
        shards = (
            coordinates.sketch(x[:, a:b], np.concatenate(KEYS), a, width)
            for a, b in itertools.pairwise(cuts)
        )
        assert np.allclose(sum(shards), whole, atol=1e-12)
    # sequences cut into pieces, and partial sums
    keys = np.concatenate(KEYS)
    pieces = coordinates.sketch(x[:7], keys[:7]) + coordinates.sketch(x[7:], keys[7:])
    assert np.allclose(pieces, whole, atol=1e-12)
    part = values(width)
    sums = coordinates.sketch(part, keys) + coordinates.sketch(x - part, keys)
    assert np.allclose(sums, whole, atol=1e-6)


def test_the_stretches_of_shards_are_those_of_the_whole() -> None:
    x = values(64)
    batch = Batch(SAMPLES, Grid(1, TOKENS, None), CPU)
    whole = batch.sketch(torch.from_numpy(x), 0, 64).numpy()
    right = batch.sketch(torch.from_numpy(x[:, 32:]), 32, 64).numpy()
    assert np.allclose(right[:4], 0) and np.allclose(right[4:], whole[4:], atol=2e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 1e-3 * GENERATOR.standard_normal(x.shape),
        lambda x: x * np.where(np.arange(x.shape[1]) == 7, 1.1, 1),
        lambda x: x * np.where(np.arange(len(x)) == 3, 1.1, 1)[:, None],
        lambda x: np.roll(x, 1, 0),
        lambda x: np.concatenate([x[:, 16:32], x[:, :16], x[:, 32:]], axis=1),
    ],
    ids=["noise", "channel", "token", "rows moved", "heads swapped"],
)
def test_a_distance_is_estimated_without_bias(change: object) -> None:
    ratios = []
    for draw in range(60):
        samples = [np.append(sample, draw) for sample in SAMPLES]
        keys = np.concatenate([coordinates.token_keys(sample) for sample in samples])
        x = GENERATOR.standard_normal((len(keys), 64))
        y = change(x)  # type: ignore[operator]
        estimate = np.linalg.norm(coordinates.sketch(y - x, keys))
        ratios.append(estimate / np.linalg.norm(y - x))
    assert abs(np.mean(ratios) - 1) < 0.05
    assert np.std(ratios) < 2 * deviation()


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, padded to 16 on a side."""
    ids = torch.full((3, 16), 98)
    mask = torch.zeros(3, 16, dtype=torch.int64)
    for row, sample in enumerate(SAMPLES):
        where = slice(16 - len(sample), 16) if side == "left" else slice(0, len(sample))
        ids[row, where] = torch.from_numpy(sample)
        mask[row, where] = 1
    return ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("told", [True, False])
def test_padding_never_enters(side: str, told: bool) -> None:
    ids, mask = padded(side)
    found = grid_of({"input_ids": ids, "attention_mask": mask}, SAMPLES if told else None)
    assert found is not None
    x = values(24)
    tensor = torch.full((3, 16, 24), 7.0)
    tensor[mask.bool()] = torch.from_numpy(x)
    batch = Batch(*found, CPU)
    rows = batch.rows(tensor)
    assert rows is not None and np.array_equal(rows.numpy(), x)
    flat = batch.rows(tensor.reshape(48, 24))
    assert flat is not None and np.array_equal(flat.numpy(), x)
    expected = coordinates.sketch(x, np.concatenate(KEYS))
    assert np.allclose(batch.sketch(rows, 0, 24).numpy(), expected, atol=2e-6)


def packed(told: bool) -> tuple[object, object] | None:
    ids = torch.from_numpy(np.concatenate(SAMPLES))[None]
    positions = torch.cat([torch.arange(len(sample)) for sample in SAMPLES])[None]
    return grid_of(
        {"input_ids": ids, "attention_mask": None, "position_ids": positions},
        SAMPLES if told else None,
    )


@pytest.mark.parametrize("told", [True, False])
def test_packed_rows_have_the_keys_of_padded_ones(told: bool) -> None:
    found = packed(told)
    ids, mask = padded("left")
    other = grid_of({"input_ids": ids, "attention_mask": mask}, None)
    assert found is not None and other is not None
    assert Batch(*found, CPU).identity == Batch(*other, CPU).identity  # type: ignore[arg-type]
    rows = Batch(*found, CPU).rows(torch.zeros(1, TOKENS, 4))  # type: ignore[arg-type]
    assert rows is not None and rows.shape == (TOKENS, 4)


def test_megatrons_packed_row_has_padding_behind_each_sample() -> None:
    bounds = torch.tensor([0, 6, 16, 30])
    given = {"packed_seq_params": types.SimpleNamespace(cu_seqlens_q_padded=bounds)}
    found = grid_of(given, SAMPLES)
    assert found is not None
    batch = Batch(*found, CPU)
    tensor = torch.arange(30.0)[:, None, None].expand(30, 1, 4)
    rows = batch.rows(tensor)
    assert rows is not None
    expected = [*range(5), *range(6, 15), *range(16, 29)]
    assert rows[:, 0].tolist() == expected
    assert grid_of(given, None) is None, "what the row's samples are is not told"
    assert grid_of(given, SAMPLES[:2]) is None


@pytest.mark.parametrize("filled", [0, 4])
def test_slimes_packed_row_says_its_samples(filled: int) -> None:
    """End to end, and filled up with a last stretch of token 0."""
    ids = torch.from_numpy(np.concatenate([*SAMPLES, np.zeros(filled, np.int64)]))[None]
    ends = np.cumsum([0, *map(len, SAMPLES), *([filled] if filled else [])])
    packed = types.SimpleNamespace(cu_seqlens_q=torch.from_numpy(ends))
    found = grid_of({"packed_seq_params": packed, "input_ids": ids}, None)
    assert found is not None
    batch = Batch(*found, CPU)
    assert np.array_equal(batch.keys, np.concatenate(KEYS))
    rows = batch.rows(torch.arange(TOKENS + filled)[:, None, None].expand(-1, 1, 4).float())
    assert rows is not None and rows[:, 0].tolist() == list(range(TOKENS))
    # padding within, and a rank's part of a sequence: the row does not say what is whose
    within = types.SimpleNamespace(cu_seqlens_q=packed.cu_seqlens_q,
                                   cu_seqlens_q_padded=packed.cu_seqlens_q + 1)  # fmt: skip
    assert grid_of({"packed_seq_params": within, "input_ids": ids}, None) is None
    shards = SequenceShards(context=2)
    assert grid_of({"packed_seq_params": packed, "input_ids": ids}, None, shards) is None


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"input_ids": torch.zeros(3, 4, dtype=torch.int64)},
        {"input_ids": torch.zeros(2, 16, dtype=torch.int64),
         "attention_mask": torch.ones(2, 16)},
        {"input_ids": torch.zeros(1, 14, dtype=torch.int64)},
    ],
    ids=["nothing", "fewer tokens", "other rows", "a slice of the sequence"],
)  # fmt: skip
def test_what_does_not_fit_its_samples_has_no_coordinates(given: dict[str, object]) -> None:
    assert grid_of(given, SAMPLES) is None


def test_a_tensor_without_a_row_a_token_has_none() -> None:
    found = packed(told=True)
    assert found is not None
    batch = Batch(*found, CPU)  # type: ignore[arg-type]
    for shape in ((8, 3), (1, TOKENS - 1, 4), (TOKENS + 1,), ()):
        assert batch.rows(torch.zeros(shape)) is None
