"""Tensor files read without torch, and their distances: the same numbers torch and numpy give."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlprobe.compare.tensors.distance import distance
from rlprobe.compare.tensors.figures import Distance
from rlprobe.dumps.tensors import dtypes, source
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError, map_file, read_tensor

G = torch.Generator().manual_seed(3)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHT_BITS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def saved(tensor: torch.Tensor, path: Path) -> TensorFile:
    torch.save(tensor, path)
    return opened(path)


def opened(path: Path, **options: Any) -> TensorFile:
    return read_tensor(map_file(path), path.name, **options)


def values(file: TensorFile) -> np.ndarray[Any, Any]:
    raw = np.concatenate(list(file.blocks(1000))) if file.size else np.empty(0, file.dtype.raw)
    return dtypes.numbers(raw, file.dtype, wide=True).reshape(file.shape)


def far(a: torch.Tensor, b: torch.Tensor, tmp: Path) -> Distance:
    return distance(saved(a, tmp / "a.pt"), saved(b, tmp / "b.pt"))


@pytest.mark.parametrize("dtype", FLOATS + EIGHT_BITS + INTEGERS, ids=str)
def test_every_element_type_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 7, generator=G) * 3).to(dtype)
    file = saved(tensor, tmp_path / "x.pt")
    assert file.dtype.name == str(dtype).removeprefix("torch.")
    assert np.array_equal(values(file), tensor.double().numpy())


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_all_values_of_8_bit_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(256, dtype=torch.uint8).view(dtype)
    found = values(saved(tensor, tmp_path / "x.pt"))
    expected = tensor.float().double().numpy()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS + EIGHT_BITS, ids=str)
def test_limits_are_torchs(dtype: torch.dtype) -> None:
    assert dtypes.DTYPES[str(dtype).removeprefix("torch.")].limit == torch.finfo(dtype).max


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, 2:9],
        lambda x: x[::3],
        lambda x: x[5:6].expand(40, 13),
        lambda x: x[0, 0],
        lambda x: x[:0],
        lambda x: x.view(2, 10, 2, 13).permute(2, 0, 3, 1),
        lambda x: x[3:, 1],
    ],
    ids=["transposed", "columns", "strided", "expanded", "scalar", "empty", "permuted", "offset"],
)
def test_views_are_read_in_row_major_order(
    tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = view(torch.randn(40, 13, generator=G))
    file = saved(tensor, tmp_path / "x.pt")
    assert file.shape == tuple(tensor.shape)
    for size in (1, 7, 1 << 20):
        blocks = list(file.blocks(size))
        assert all(len(block) <= max(size, 1) for block in blocks)
        flat = np.concatenate(blocks) if blocks else np.empty(0, np.float32)
        assert np.array_equal(flat, tensor.reshape(-1).numpy())


def test_parameters_are_tensors(tmp_path: Path) -> None:
    file = saved(torch.nn.Parameter(torch.ones(3)), tmp_path / "x.pt")
    assert file.shape == (3,)


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_are_read(tmp_path: Path, order: Any) -> None:
    array = np.asarray(np.arange(12.0).reshape(3, 4), order=order)
    np.save(tmp_path / "x.npy", array)
    assert np.array_equal(values(opened(tmp_path / "x.npy")), array)


def test_packed_files_are_read_in_place(tmp_path: Path) -> None:
    torch.save(torch.arange(5.0), tmp_path / "x.pt")
    blob = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "packed.zip").write_bytes(bytes(64) + blob + bytes(9))
    place = _Span(tmp_path / "packed.zip", 64, len(blob))
    tensors = source.in_store({"x.pt": place})
    assert np.array_equal(values(tensors.open("x.pt", [5])), np.arange(5.0))
    with pytest.raises(TensorFileError, match="no such file"):
        tensors.open("y.pt", [5])
    with pytest.raises(TensorFileError, match="the record says"):
        tensors.open("x.pt", [6])
    short = source.in_store({"x.pt": _Span(tmp_path / "packed.zip", 64, 10**6)})
    with pytest.raises(TensorFileError, match="cut short"):
        short.open("x.pt", [5])


class _Span:
    def __init__(self, file: Path, offset: int, size: int) -> None:
        self.file, self.offset, self.size = file, offset, size


# Hostile files


def _pt(entries: dict[str, bytes], path: Path, **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", options.get("compression", zipfile.ZIP_STORED)) as archive:
        for name, content in {"version": b"3\n", **entries}.items():
            archive.writestr(f"x/{name}", content)
    return path


def _described(shape: Any, strides: Any, size: int, offset: int = 0, name: str = "v2") -> bytes:
    """The pickle of a tensor over storage 0, with whatever it claims."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, Storage):
                return ("storage", torch.FloatStorage, "0", "cpu", size)
            return None

    class Tensor:
        def __reduce__(self) -> Any:
            from collections import OrderedDict

            build = torch._utils._rebuild_tensor_v2
            return build, (Storage(), offset, shape, strides, False, OrderedDict())

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(Tensor())
    assert name == "v2"
    return buffer.getvalue()


def refused(path: Path) -> str:
    with pytest.raises(TensorFileError) as error:
        opened(path)
    return str(error.value)


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    path = _pt({"data.pkl": pickle.dumps(Evil(), protocol=2), "data/0": b""}, tmp_path / "x.pt")
    assert "calls" in refused(path) or "no tensor needs" in refused(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [{"a": 1}, [1, 2], "text", (torch.ones(1), 3), None, 5])
def test_what_is_no_tensor_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("view", "mark"),
    [
        (lambda z: z.conj(), "conj"),
        (lambda z: z.conj().imag, "neg"),
        (lambda z: torch.nn.Parameter(z.conj()), "conj"),
        (lambda z: z.to(torch.complex128).conj()[1:], "conj"),
    ],
)
def test_a_view_whose_file_holds_other_numbers_is_refused(
    tmp_path: Path, view: Any, mark: str
) -> None:
    """torch writes the numbers before they are conjugated or negated, and a mark."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    torch.save(view(z), tmp_path / "x.pt")
    assert f"marked {mark}" in refused(tmp_path / "x.pt")
    made = view(z).resolve_conj().resolve_neg()
    assert saved(made, tmp_path / "y.pt").shape == tuple(made.shape)


def test_an_expanded_tensor_claiming_a_terabyte_is_refused(tmp_path: Path) -> None:
    path = _pt({"data.pkl": _described((2**38,), (0,), 1), "data/0": bytes(4)}, tmp_path / "x.pt")
    assert "claims" in refused(path)
    assert torch.load(path, weights_only=True).shape == (2**38,)


@pytest.mark.parametrize(
    ("shape", "strides", "size", "offset"),
    [((5,), (1,), 4, 0), ((2, 2), (3, 1), 4, 0), ((4,), (1,), 4, 1), ((4,), (1,), 400, 0)],
    ids=["longer", "strides", "offset", "storage"],
)
def test_a_tensor_reaching_outside_its_storage_is_refused(
    tmp_path: Path, shape: Any, strides: Any, size: int, offset: int
) -> None:
    blob = _described(shape, strides, size, offset)
    path = _pt({"data.pkl": blob, "data/0": bytes(16)}, tmp_path / "x.pt")
    refused(path)


@pytest.mark.parametrize("shape", [(-1,), (2.0,), ("a",), (1,) * 65, (True,)])
def test_a_shape_that_is_none_is_refused(tmp_path: Path, shape: Any) -> None:
    blob = _described(shape, (1,) * len(shape), 4)
    refused(_pt({"data.pkl": blob, "data/0": bytes(16)}, tmp_path / "x.pt"))


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    entries = {"data.pkl": _described((4,), (1,), 4), "data/0": bytes(16)}
    path = _pt(entries, tmp_path / "x.pt", compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in refused(path)


def test_a_storage_that_is_missing_is_named(tmp_path: Path) -> None:
    path = _pt({"data.pkl": _described((4,), (1,), 4)}, tmp_path / "x.pt")
    assert "storage '0' is missing" in refused(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(100.0), tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    for length in range(0, len(whole), 37):
        (tmp_path / "y.pt").write_bytes(whole[:length])
        refused(tmp_path / "y.pt")


def test_no_damaged_byte_crashes_the_reader(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "x.pt")
    whole = bytearray((tmp_path / "x.pt").read_bytes())
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (tmp_path / "y.pt").write_bytes(damaged)
        try:
            list(opened(tmp_path / "y.pt").blocks(64))
        except TensorFileError:
            continue


def test_a_flipped_bit_is_found_on_request(tmp_path: Path) -> None:
    torch.save(torch.arange(64.0), tmp_path / "x.pt")
    whole = bytearray((tmp_path / "x.pt").read_bytes())
    at = whole.find(struct.pack("<f", 33.0))
    whole[at] ^= 1
    (tmp_path / "x.pt").write_bytes(whole)
    opened(tmp_path / "x.pt")
    with pytest.raises(TensorFileError, match="CRC-32"):
        opened(tmp_path / "x.pt", check_crc=True)


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object))
    assert "plain numbers" in refused(tmp_path / "x.npy")


def test_a_directory_is_no_tensor(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError):
        map_file(tmp_path)


# Distances


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 5, 2048, 2049, 300_000])
def test_distances_are_numpys(tmp_path: Path, dtype: torch.dtype, size: int) -> None:
    a = torch.randn(size, generator=G).to(dtype)
    b = (a.double() * (1 + 2e-3 * torch.randn(size, generator=G))).to(dtype)
    a[::7] = 0
    found = far(a, b, tmp_path)
    x, y = a.double().numpy(), b.double().numpy()
    difference = np.abs(y - x)
    assert found.euclidean == pytest.approx(np.linalg.norm(y - x), rel=1e-12)
    assert found.error == pytest.approx(
        np.linalg.norm(y - x) / (np.linalg.norm(x) or np.linalg.norm(y) or 1), rel=1e-12
    )
    assert found.max_abs_err == difference.max()
    if difference.max() > 0:
        assert found.max_abs_index == int(difference.argmax())
    narrow = np.float64 if dtype == torch.float64 else np.float32
    n, m = y.astype(narrow), x.astype(narrow)
    eps = np.finfo(narrow).eps
    n[m == 0] += eps
    m[m == 0] += eps
    relative = np.abs((n - m) / m)
    assert found.max_rel_err == relative.max()
    assert found.within_1e3 == (relative < narrow(1e-3)).mean()
    assert found.within_5e3 == (relative < narrow(5e-3)).mean()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_neighbouring_values_are_one_step_apart(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, -1.0, 0.0, 2.0]).to(dtype)
    b = torch.nextafter(a, torch.full_like(a, 100.0)) if dtype != torch.float16 else None
    if b is None:
        b = torch.tensor([1.0 + 2**-10, -1.0 + 2**-11, 6e-8, 2.0 + 2**-9], dtype=dtype)
    assert far(a, b, tmp_path).ulp_max == 1


def test_both_zeros_are_the_same_value(tmp_path: Path) -> None:
    found = far(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), tmp_path)
    assert found.ulp_max == 0 and found.error == 0 and found.max_abs_index is None


def test_steps_across_zero_count_all_values_between(tmp_path: Path) -> None:
    tiny = torch.tensor([1.0], dtype=torch.float32).mul(1e-45)
    assert far(tiny, -tiny, tmp_path).ulp_max == 2


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    a = torch.tensor([2**62, -(2**62), 5])
    b = torch.tensor([2**62 + 1, -(2**62), 5])
    found = far(a, b, tmp_path)
    assert found.max_abs_err == 1.0 and found.ulp_max == 1.0
    lowest = far(torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), tmp_path)
    assert lowest.max_abs_err == pytest.approx(2.0**64)


def test_permuted_rows_are_far_apart(tmp_path: Path) -> None:
    x = torch.randn(64, 32, generator=G)
    found = far(x, x[torch.randperm(64, generator=G)], tmp_path)
    assert found.error == pytest.approx(math.sqrt(2), rel=0.1)
    assert found.cosine == pytest.approx(0.0, abs=0.1)


def test_strided_and_contiguous_tensors_meet_element_by_element(tmp_path: Path) -> None:
    x = torch.randn(700, 900, generator=G)
    found = far(x.t(), x.t().contiguous(), tmp_path)
    assert found.error == 0 and found.size == x.numel()


def test_different_types_are_compared_by_value(tmp_path: Path) -> None:
    x = torch.randn(100, generator=G)
    found = far(x, x.bfloat16(), tmp_path)
    expected = (x.bfloat16().double() - x.double()).norm() / x.double().norm()
    assert found.error == pytest.approx(float(expected), rel=1e-12)
    assert found.ulp_max is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_nonfinite_values_are_left_out(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.randn(5000, generator=G).to(dtype)
    a[3], a[4000], a[17] = math.inf, -math.inf, math.nan
    b = a.clone()
    b[100] += 1
    found = far(a, b, tmp_path)
    assert (found.nonfinite_benchmark, found.nonfinite_target, found.nonfinite_same) == (3, 3, 3)
    assert found.max_abs_index == 100
    assert found.within_1e3 == 4999 / 5000


#: The same NaN, signalling, in the integers of each size.
_SIGNALLING = {
    torch.float16: (torch.int16, 0x7C01),
    torch.bfloat16: (torch.int16, 0x7F81),
    torch.float32: (torch.int32, 0x7F800001),
    torch.float64: (torch.int64, 0x7FF0000000000001),
    torch.complex64: (torch.int32, 0x7F800001),
    torch.complex128: (torch.int64, 0x7FF0000000000001),
}


@pytest.mark.parametrize("dtype", _SIGNALLING, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_signalling_nan_is_a_nan(tmp_path: Path, dtype: torch.dtype, wide: bool) -> None:
    bits, number = _SIGNALLING[dtype]
    tensor = torch.ones(6, dtype=dtype)
    tensor.view(bits)[2] = number
    widest = torch.complex128 if dtype.is_complex else torch.float64
    found = far(tensor, torch.ones(6, dtype=widest if wide else dtype), tmp_path)
    assert (found.nonfinite_benchmark, found.nonfinite_target) == (1, 0)
    assert found.error == 0


@pytest.mark.parametrize(
    ("left", "right"), [(math.inf, -math.inf), (math.nan, 1.0), (1.0, math.inf)]
)
def test_other_nonfinite_values_are_counted(tmp_path: Path, left: float, right: float) -> None:
    a, b = torch.ones(10), torch.ones(10)
    a[5], b[5] = left, right
    found = far(a, b, tmp_path)
    assert max(found.nonfinite_benchmark, found.nonfinite_target) > found.nonfinite_same
    assert found.within_1e3 == 0.9


def test_saturation_instead_of_infinity_is_counted(tmp_path: Path) -> None:
    """A device that clamps to 65504 where another overflows."""
    a = torch.tensor([1.0, math.inf, 3.0, 65504.0], dtype=torch.float16)
    b = torch.tensor([1.0, 65504.0, 3.0, 65504.0], dtype=torch.float16)
    assert far(a, b, tmp_path).saturated == 1


def test_values_whose_squares_overflow_are_still_compared(tmp_path: Path) -> None:
    a = torch.full((10,), 1e300, dtype=torch.float64)
    found = far(a, a * (1 + 1e-3), tmp_path)
    assert found.error == pytest.approx(1e-3, rel=1e-9)
    assert found.nonfinite_benchmark == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing_differs_by_nothing(tmp_path: Path, shape: Any) -> None:
    found = far(torch.empty(shape), torch.empty(shape), tmp_path)
    assert found.error == 0 and found.within_1e3 == 1.0


def test_other_sizes_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="3 elements against 4"):
        far(torch.ones(3), torch.ones(4), tmp_path)
