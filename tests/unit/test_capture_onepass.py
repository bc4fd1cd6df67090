"""Large CPU tensors are read once: are the numbers those of torch, and the same bits either way?"""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from torch import Tensor  # noqa: E402

from rlprobe import coordinates, sketch  # noqa: E402
from rlprobe.capture.light import onepass, onepass_compiled  # noqa: E402
from rlprobe.capture.light.coordinates import Batch, Grid  # noqa: E402
from rlprobe.capture.light.statistics import Statistics  # noqa: E402
from rlprobe.sketch_floors import ACCUMULATION  # noqa: E402
from tests.unit.capture_helpers import UPDATE, Tiny, dump, make, recorder, tokens  # noqa: E402

pytestmark = pytest.mark.slow

EPS = float(np.finfo(np.float32).eps)
#: Whole runs of rows; parts of a run, of four rows, of a row.
SIZES = [
    onepass.LEAST, onepass.WIDTH * 16 * 5, onepass.WIDTH * 87, onepass.WIDTH * 83 + 1,
    onepass.WIDTH * 69 - 1, 300_007,
]  # fmt: skip


def values(count: int, kind: str = "centred") -> Tensor:
    found = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return {
        "centred": found,
        "shifted": found + 100,
        "wide": found * torch.logspace(-12, 12, count),
        "sparse": found * (found > 1),
        "constant": torch.full((count,), -0.1),
    }[kind]


def found_by(reader: onepass.Reader, x: Tensor, sketched: bool) -> Any:
    out = np.full(4 + sketch.K, np.nan)
    signs = sketch.base_signs(x.numel()) if sketched else None
    reader(x.data_ptr(), x.numel(), signs, out)
    return (out if sketched else out[:4]) + 0.0  # zeros have no sign in what is recorded


@pytest.mark.parametrize("kind", ["centred", "shifted", "wide", "sparse", "constant"])
@pytest.mark.parametrize("count", SIZES)
def test_compiled_or_not_the_bits_are_the_same(count: int, kind: str) -> None:
    x = values(count, kind)
    for sketched in (False, True):
        one = found_by(onepass._plain, x, sketched)
        other = found_by(onepass_compiled.read, x, sketched)
        assert one.tobytes() == other.tobytes()


@pytest.fixture(params=["plain", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    readers = {"plain": onepass._plain, "compiled": onepass_compiled.read}
    monkeypatch.setattr(onepass._Choice, "reader", readers[request.param])
    return str(request.param)


@pytest.mark.parametrize("kind", ["centred", "shifted", "wide", "sparse", "constant"])
@pytest.mark.parametrize("count", SIZES[1::2])
def test_numbers_are_those_of_the_values(way: str, count: int, kind: str) -> None:
    x = values(count, kind).reshape(-1, 1)
    found = onepass.read(x, True)
    assert found is not None
    assert (found.high, found.low) == (float(x.max()), float(x.min()))
    wide = x.double()
    # sixteen fp32 additions in a row, and the rounding of the result
    size = float(wide.abs().mean())
    assert abs(found.mean - float(wide.mean())) <= 17 * EPS * size
    assert abs(found.norm - float(wide.norm())) <= 17 * EPS * float(wide.norm())
    # no further from the truth than torch's own, give or take a rounding
    assert abs(found.norm - float(wide.norm())) <= (
        abs(float(x.norm()) - float(wide.norm())) + 2 * EPS * float(wide.norm())
    )
    expected = sketch.sketch(x.numpy())
    assert found.sketch is not None
    assert np.linalg.norm(found.sketch - expected) <= ACCUMULATION * float(wide.norm())


def test_a_tensor_longer_than_the_table_of_signs() -> None:
    behind = values(70_001)
    x = torch.zeros(sketch.PERIOD + behind.numel())
    x[sketch.PERIOD :] = behind
    found = onepass.read(x, True)
    assert found is not None and found.sketch is not None
    norm = float(behind.double().norm())
    expected = sketch.sketch(behind.numpy(), sketch.PERIOD)
    assert np.linalg.norm(found.sketch - expected) <= ACCUMULATION * norm
    assert found.high == float(behind.max()) and found.norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -3.4e38, 2e19])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_not_finite_or_overflows_is_as_torch_has_it(
    way: str, bad: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = values(onepass.WIDTH * 70 + 3)
    x[place] = bad
    leaves = []
    for installed in (True, False):
        monkeypatch.setattr(onepass, "_COMPILER", installed)
        statistics = Statistics(with_sketch=True)
        leaves.append(statistics.leaf(x))
        statistics.resolve()
    assert json.dumps(leaves[0]) == json.dumps(leaves[1])
    assert leaves[0]["NonFinite"] in ("nan", "inf", "overflow")


@pytest.mark.parametrize(
    ("count", "first", "width"),
    [(256, 0, 256), (1024, 0, 1024), (128, 128, 256), (100, 37, 300), (33, 31, 64), (1, 7, 8)],
)
def test_a_sketch_by_coordinates_is_torchs_bit_for_bit(
    count: int, first: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = np.random.default_rng(0)
    samples = [drawn.integers(0, 4096, length) for length in (40, 1, 23)]
    batch = Batch(samples, Grid(1, 64, None), torch.device("cpu"))
    rows = values(64 * count).reshape(64, count)
    monkeypatch.setattr(onepass._Choice, "reader", None)
    by_torch = batch.sketch(rows, first, width)
    monkeypatch.setattr(onepass._Choice, "reader", onepass_compiled.read)
    assert torch.equal(batch.sketch(rows, first, width), by_torch)
    keys = np.concatenate([coordinates.token_keys(sample) for sample in samples])
    expected = coordinates.sketch(rows.numpy(), keys, first, width)
    assert np.linalg.norm(by_torch.numpy() - expected) <= 1e-6 * np.linalg.norm(expected)


def test_a_stage_is_the_same_before_and_after_the_compiled_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that has read much, and the one that has just begun, leave the same file."""
    texts = []
    for name, reader in (("plain", onepass._plain), ("compiled", onepass_compiled.read)):
        monkeypatch.setattr(onepass._Choice, "reader", reader)
        model = make(lambda: Tiny(width=192))
        with recorder(tmp_path / name, sketch=True).stage(UPDATE, 0, 1, model):
            model(tokens()).square().mean().backward()
        texts.append(json.dumps(dump(tmp_path / name)))
    assert texts[0] == texts[1]


def test_numba_is_loaded_once_enough_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onepass._Choice, "reader", None)
    monkeypatch.setattr(onepass._Choice, "read", 0)
    x = values(1 << 18)
    monkeypatch.setattr(onepass, "WORTHWHILE", 2 * x.numel() * 4)
    onepass.read(x, False)
    assert onepass._Choice.reader is None
    onepass.read(x, False)
    assert onepass._Choice.reader is onepass_compiled.read


def test_only_large_fp32_tensors_in_order_on_a_cpu_are_read_so() -> None:
    x = values(1 << 16).reshape(256, 256)
    assert onepass.takes(x)
    negative = torch._neg_view(x)  # a view that numpy does not know of
    for other in (x.t(), x[:, :200], x.double(), x.bfloat16(), x[:8], x.to("meta"), negative):
        assert not onepass.takes(other)


def test_a_tensor_is_measured_once_while_it_lives_and_not_kept_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statistics = Statistics(with_sketch=False)
    measured: list[int] = []
    real = statistics._measure

    def counted(x: Tensor) -> Any:
        measured.append(x.numel())
        return real(x)

    monkeypatch.setattr(statistics, "_measure", counted)
    x = values(1 << 16).requires_grad_()
    y = x * 2
    statistics.leaf(y)
    statistics.leaf(y)
    assert measured == [1 << 16]
    with torch.no_grad():
        y.mul_(3)
    statistics.leaf(y)
    assert len(measured) == 2, "it was changed in place"
    gone = weakref.ref(y)
    del y
    assert gone() is None
    # most likely at the same address: nothing says that it is the same tensor
    again = x.detach() * 5
    leaf = statistics.leaf(again)
    statistics.resolve()
    assert leaf["Max"] == float(again.max())


def test_a_storage_that_was_read_can_still_be_freed(tmp_path: Path) -> None:
    """FSDP2 resizes the storage of every parameter that it has gathered."""
    tensor = torch.randn(onepass.LEAST)
    assert onepass.read(tensor, True) is not None
    batch = Batch([np.arange(1, 9)], Grid(1, 8, None), torch.device("cpu"))
    rows = torch.randn(8, onepass.LEAST // 8)
    batch.sketch(rows, 0, rows.shape[1])
    for read in (tensor, rows):
        read.untyped_storage().resize_(0)
        assert read.untyped_storage().size() == 0
