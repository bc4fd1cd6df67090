"""Random dump pairs of every kind, and what comparing them must say of each record."""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from tests.unit.compare import exact

DTYPES = tuple(exact.SIZES)
#: Types whose statistics msprobe writes.
COUNTED = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "bool", "complex64",
)  # fmt: skip
REALS = tuple(n for n in DTYPES if n not in exact.COMPLEX and n != exact.FP4)
STATISTICS = ("max", "min", "mean", "norm")
FLOOR = math.sqrt(2.0) * 1.8e-7

Row = dict[str, Any]
Check = Callable[[Row], None]


@dataclass
class Pair:
    """Two dumps as they are written, and a check of each record."""

    benchmark: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    files: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        for number, (side, data) in enumerate((("b", self.benchmark), ("t", self.target))):
            tensors = directory / side / "dump_tensor_data"
            tensors.mkdir(parents=True)
            text = json.dumps({"task": "tensor", "level": "debug", "data": data})
            (directory / side / "debug.json").write_text(text)
            for name, both in self.files.items():
                tensor = both[number]
                if tensor is not None:
                    torch.save(tensor, tensors / name)


def pair(seed: int) -> Pair:
    """A pair of some records; the same for the same seed."""
    rng = random.Random(seed)
    made = Pair()
    kinds = rng.choices(
        (_tensor, _statistics, _scalar, _checksum, _sketch, _alone, _shape, _nothing),
        (8, 8, 4, 3, 3, 1, 1, 1),
        k=rng.randint(1, 6),
    )
    for number, kind in enumerate(kinds):
        kind(rng, f"r{number}", made)
    return made


def _add(made: Pair, name: str, b: Any, t: Any, check: Check) -> None:
    if b is not None:
        made.benchmark[f"{name}.0.debug"] = b
    if t is not None:
        made.target[f"{name}.0.debug"] = t
    made.checks[f"{name}.0.debug"] = check


def _raw(rng: random.Random, dtype: str, count: int) -> bytes:
    """Elements as bytes: anything, small numbers, zeros, limits."""
    size = exact.SIZES[dtype]
    if dtype == "bool":
        return bytes(rng.choices((0, 1), k=count))
    mode = rng.choice(("bits", "small", "zero", "limits", "one size"))
    if mode == "bits":
        return rng.randbytes(count * size)
    if mode == "zero":
        return bytes(count * size)
    kind = getattr(torch, dtype)
    if mode == "limits" and dtype in exact.INTEGERS:
        ends = torch.iinfo(kind)
        near = [ends.min, ends.min + 1, ends.max - 1, ends.max, 2**53, 2**53 + 1, 0]
        whole = [n for n in near if ends.min <= n <= ends.max]
        signed = dtype.startswith("int")
        return b"".join(
            rng.choice(whole).to_bytes(size, "little", signed=signed) for _ in range(count)
        )
    if dtype == exact.FP4:
        return rng.randbytes(count)
    if mode == "limits":
        # exponents near either end of the format
        if dtype == exact.E8M0:
            return bytes(rng.choices((0, 1, 127, 253, 254), k=count))
        part = exact.COMPLEX.get(dtype, dtype)
        width, _, mantissa, _, _ = exact.FLOATS[part]
        top = (1 << (width * 8 - 1)) - (1 << mantissa)
        codes = [rng.choice((1, 2, 3, top - 1, top - 2, 1 << mantissa)) for _ in range(
            count * size // width
        )]  # fmt: skip
        codes = [code | rng.getrandbits(1) << (width * 8 - 1) for code in codes]
        return b"".join(code.to_bytes(width, "little") for code in codes)
    scale = 10.0 ** rng.randint(-250, 250) if mode == "one size" and "64" in dtype else 1.0
    if dtype in exact.INTEGERS:
        return b"".join(rng.randrange(100).to_bytes(size, "little") for _ in range(count))
    values = torch.tensor(
        [rng.gauss(0, 3) * scale for _ in range(count * (2 if dtype in exact.COMPLEX else 1))],
        dtype=torch.float64,
    )
    if dtype in exact.COMPLEX:
        part_type = getattr(torch, exact.COMPLEX[dtype])
        return _bytes(values.to(part_type))
    if dtype == exact.E8M0:
        return bytes(rng.choices(range(100, 150), k=count))
    return _bytes(values.to(torch.float32).to(kind) if size == 1 else values.to(kind))


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def _changed(rng: random.Random, raw: bytes, dtype: str) -> bytes:
    """What the target has: the same, or a little or wholly different."""
    size = exact.SIZES[dtype]
    mode = rng.choice(("same", "bit", "step", "sign", "order", "other", "zero"))
    count = len(raw) // size
    if not count or mode == "same":
        return raw
    if dtype == "bool" or mode == "order":
        parts = [raw[at : at + size] for at in range(0, len(raw), size)]
        rng.shuffle(parts)
        return b"".join(parts)
    if mode == "other":
        return _raw(rng, dtype, count)
    if mode == "zero":
        return bytes(len(raw))
    at = rng.randrange(count) * size
    code = int.from_bytes(raw[at : at + size], "little")
    if mode == "bit":
        code ^= 1 << rng.randrange(size * 8)
    elif mode == "step":
        code = (code + 1) % (1 << (size * 8))
    else:
        code ^= 1 << (size * 8 - 1)
    return raw[:at] + code.to_bytes(size, "little") + raw[at + size :]


def _shaped(rng: random.Random, count: int) -> list[int]:
    if count == 1 and rng.random() < 0.5:
        return []
    if count % 2 == 0 and rng.random() < 0.5:
        return [2, count // 2]
    return [count]


def _as_tensor(raw: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not raw:
        return torch.empty(shape, dtype=torch.uint8).view(kind) if kind.itemsize == 1 else (
            torch.empty(shape, dtype=kind)
        )  # fmt: skip
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).reshape(shape)


def _leaf(dtype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "torch.Tensor", "dtype": f"torch.{dtype}", "shape": shape,
        "Max": None, "Min": None, "Mean": None, "Norm": None, "requires_grad": False, **more,
    }  # fmt: skip


def close(found: float | None, true: float | None, digits: float = 1e-12) -> bool:
    if found is None or true is None:
        return found is None and true is None
    if math.isinf(true) or math.isinf(found):
        return found == true or min(abs(found), abs(true)) >= exact.LARGEST * (1 - 1e-12)
    return abs(found - true) <= digits * abs(true) + 5e-324


def _tensor(rng: random.Random, name: str, made: Pair) -> None:
    dtype = other = rng.choice(DTYPES)
    count = rng.choice((0, 1, 2, 3, 6, 8))
    raw = _raw(rng, dtype, count)
    changed = _changed(rng, raw, dtype)
    if dtype in REALS and rng.random() < 0.15:
        other = rng.choice(REALS)
        changed = _raw(rng, other, count)
    shape = _shaped(rng, count)
    leaves: list[dict[str, Any]] = []
    tensors: list[torch.Tensor] = []
    turned = len(shape) == 2 and exact.FP4 not in (dtype, other) and rng.random() < 0.3
    for kind, content in ((dtype, raw), (other, changed)):
        tensor = _as_tensor(content, kind, shape)
        if turned and not tensors:
            # the same values behind other strides
            tensor = _as_tensor(content, kind, shape).t().contiguous().t()
        tensors.append(tensor)
        leaves.append(_leaf(kind, shape, data_name=f"{name}.0.debug.pt"))
    made.files[f"{name}.0.debug.pt"] = (tensors[0], tensors[1])
    truth = exact.compared(raw, changed, dtype, other)

    def check(row: Row) -> None:
        status = "nonfinite" if truth.nonfinite else "dtype" if dtype != other else "matched"
        assert row["status"] == status
        assert row["error_kind"] == "tensor" or count == 0
        if truth.nonfinite:
            assert row["reason"] == truth.nonfinite
        if count == 0:
            assert row["error"] == (0 if dtype == other else row["error"])
            assert row["identical"] == (dtype == other)
            return
        assert row["identical"] == truth.identical
        assert close(row["error"], truth.error)
        assert close(row["euclidean"], truth.euclidean)
        if truth.cosine is None or row["cosine"] is None:
            assert row["cosine"] is None and truth.cosine is None
        else:
            assert abs(row["cosine"] - truth.cosine) < 1e-9
        assert close(row["max_abs_err"], truth.max_abs_err, 1e-15)
        assert row["max_abs_index"] in (truth.where or {None})
        assert row["ulp_max"] is None if truth.ulp_max is None else close(
            row["ulp_max"], truth.ulp_max, 1e-15
        )  # fmt: skip
        assert close(row["max_rel_err"], truth.max_rel_err, 1e-6) or (
            # beyond 53 bits msprobe's arithmetic sees nothing, ours the true share
            truth.max_rel_err < 1e-15 and row["max_rel_err"] < 1e-12
        )
        assert row["within_1e3"] == truth.within_1e3 and row["within_5e3"] == truth.within_5e3

    _add(made, name, leaves[0], leaves[1], check)


def _counted(rng: random.Random, raw: bytes, dtype: str, shape: list[int]) -> dict[str, Any]:
    """Statistics as torch gives them, some left out."""
    tensor = _as_tensor(raw, dtype, shape)
    if dtype in exact.COMPLEX:
        tensor = tensor.abs()
    found = {"Max": tensor.max().item(), "Min": tensor.min().item()}
    if tensor.is_floating_point():
        found |= {"Mean": tensor.mean().item(), "Norm": torch.norm(tensor).item()}
    for key in list(found):
        if rng.random() < 0.1:
            del found[key]
    return found


def _statistics(rng: random.Random, name: str, made: Pair) -> None:
    dtype = other = rng.choice(COUNTED)
    count = rng.choice((1, 2, 3, 8, 40))
    raw = _raw(rng, dtype, count)
    changed = _changed(rng, raw, dtype)
    if dtype not in exact.COMPLEX and rng.random() < 0.1:
        other = rng.choice([n for n in COUNTED if n not in exact.COMPLEX])
        changed = _raw(rng, other, count)
    shape = _shaped(rng, count)
    known = [_counted(rng, raw, dtype, shape), _counted(rng, changed, other, shape)]
    truth = exact.compared(raw, changed, dtype, other)
    common = set(known[0]) & set(known[1])
    off = [
        any(key in side and not math.isfinite(side[key]) for key in ("Max", "Min"))
        for side in known
    ]
    nan = any(math.isnan(side.get(key, 0)) for side in known for key in ("Max", "Min"))
    apart = {
        key: Fraction(known[1][key]) - Fraction(known[0][key])
        for key in common
        if all(math.isfinite(side[key]) for side in known)
    }

    # a norm that overflowed on one side, of values whose extreme was not recorded
    overflowed = "Norm" in common and len({math.isinf(side["Norm"]) for side in known}) == 2

    def check(row: Row) -> None:
        assert not row["identical"]
        if any(off):
            assert row["status"] == "nonfinite"
            assert row["reason"] == ("both" if all(off) else "target" if off[1] else "benchmark")
            assert row["error"] is None or (row["error"] == 0 and not nan and all(off))
            return
        assert row["status"] == ("matched" if dtype == other else "dtype")
        for key in ("Max", "Min"):
            if key in apart:
                assert row[f"{key.lower()}_diff"] == exact.as_float(apart[key])
        if not common:
            assert row["error"] is None and "statistic" in row["reason"]
            return
        if row["error"] is None:
            if overflowed and not any(apart.values()):
                assert "overflowed on one side only" in row["reason"]
                return
            # nothing says relative to what
            assert any(apart.values()) or not apart
            assert not {"Max", "Min"} <= set(known[0]) or not {"Max", "Min"} <= set(known[1])
            return
        assert row["error_kind"] == "statistics"
        assert truth.error is None or row["error"] <= truth.error * (1 + 1e-12) + 5e-324
        if row["error"] == 0 and all(known[0][key] == known[1][key] for key in common):
            assert row["reason"] == "no difference seen"
        # extremes are elements: what they differ by is seen, and counts against the largest
        extremes = max((abs(apart[key]) for key in ("Max", "Min") if key in apart), default=0)
        if extremes and dtype not in exact.COMPLEX and {"Max", "Min"} <= set(known[0]):
            top = max(abs(Fraction(known[0][key])) for key in ("Max", "Min"))
            assert row["error"] > 0
            if top:
                # a difference that no float64 holds counts as the largest one
                seen = min(extremes, Fraction(exact.LARGEST)) / top
                least = exact.as_float(seen) / math.sqrt(count)
                assert row["error"] >= min(least, exact.LARGEST) * (1 - 1e-9)

    _add(
        made, name, _leaf(dtype, shape, **known[0]), _leaf(other, shape, **known[1]), check
    )  # fmt: skip


def _scalar(rng: random.Random, name: str, made: Pair) -> None:
    def value() -> Any:
        return rng.choice((
            rng.randint(-5, 5), 2**53 + rng.randint(-1, 1), 10**30 + rng.randint(0, 1),
            rng.random(), 1e-320 * rng.randint(1, 3), 1.7e308 * rng.choice((-1, 1)), 0.0, -0.0,
            math.nan, math.inf, -math.inf, True, False, "1.0", "1.00", "abc", "nan", "",
        ))  # fmt: skip

    b = value()
    t = b if rng.random() < 0.3 else value()
    same_text = type(b) is type(t) and repr(b) == repr(t)
    off = [isinstance(v, float) and not math.isfinite(v) for v in (b, t)]
    difference, error = exact.scalar(b, t)

    def check(row: Row) -> None:
        if any(off):
            assert row["status"] == "nonfinite"
            assert row["reason"] == ("both" if all(off) else "target" if off[1] else "benchmark")
            equal = all(off) and b == t
            assert row["error"] == (0 if equal else None)
            assert row["identical"] == (equal and same_text)
            return
        assert row["status"] == ("matched" if type(b) is type(t) else "dtype")
        assert close(row["error"], error, 1e-15)
        assert close(row["max_diff"], difference, 1e-15)
        assert row["identical"] == same_text

    leaves = [
        {"type": type(v).__name__, "value": str(v) if isinstance(v, float) and not math.isfinite(v)
         else v} for v in (b, t)
    ]  # fmt: skip
    _add(made, name, leaves[0], leaves[1], check)


def _checksum(rng: random.Random, name: str, made: Pair) -> None:
    kinds = [rng.choice(("xor", "crc32", "sha256")) for _ in range(2)]
    if rng.random() < 0.8:
        kinds[1] = kinds[0]
    content = rng.getrandbits(31)
    other = content if rng.random() < 0.5 else content ^ (1 << rng.randrange(31))
    counted = rng.random() < 0.5
    top = [1.5, 1.5 if rng.random() < 0.6 else 2.5]
    leaves = []
    for kind, number, most in zip(kinds, (content, other), top, strict=True):
        keys: dict[str, Any] = {"Max": most, "Min": -1.0} if counted else {}
        if kind == "sha256":
            keys["Digest"] = f"sha256:{number:064x}"
        else:
            keys["md5"] = f"0x{number:016x}" if kind == "xor" else f"{number + 1:08x}"
        leaves.append(_leaf("float32", [4], **keys))
    alike = kinds[0] == kinds[1]
    moved = counted and top[0] != top[1]

    def check(row: Row) -> None:
        known = alike and content == other and kinds[0] != "xor" and not moved
        assert row["status"] == "matched"
        assert row["identical"] == known
        if known:
            assert (row["error"], row["error_kind"]) == (0, "digest")
        elif moved:
            assert row["error"] >= 1 / 1.5 / 2 * (1 - 1e-9) and row["error_kind"] == "statistics"
        elif alike and content != other:
            assert row["error"] is None and "checksums differ" in row["reason"]
            assert row["error_kind"] == ("digest" if counted else None)
        elif counted:
            assert (row["error"], row["reason"]) == (0, "no difference seen")
        else:
            assert row["error"] is None and row["error_kind"] is None and row["reason"]

    _add(made, name, leaves[0], leaves[1], check)


def _sketch(rng: random.Random, name: str, made: Pair) -> None:
    lengths = [rng.choice((1, 5, 61))] * 2
    raw = [struct.pack(f"<{k}f", *(rng.gauss(0, 1) for _ in range(k))) for k in lengths]
    mode = rng.choice(("same", "near", "other"))
    if mode == "same":
        raw[1] = raw[0]
    elif mode == "near":
        raw[1] = struct.pack(
            f"<{lengths[0]}f", *(float(v) * (1 + 1e-7) for v in exact.float32s(raw[0]))
        )
    norms = [rng.choice((None, 0.0, math.inf, 3.0))] * 2
    leaves = [
        _leaf("float32", [100], Norm=norm, Sketch="b64:" + base64.b64encode(blob).decode())
        for norm, blob in zip(norms, raw, strict=True)
    ]
    b, t = (exact.float32s(blob) for blob in raw)
    distance = sum(((y - x) ** 2 for x, y in zip(b, t, strict=True)), Fraction(0))
    own = sum((x * x for x in b), Fraction(0)) or sum((y * y for y in t), Fraction(0))
    usable = norms[0] is not None and math.isfinite(norms[0]) and norms[0] > 0
    scale = Fraction(norms[0] or 1) ** 2 if usable else own
    true = exact.root(distance / scale) if distance else 0.0

    def check(row: Row) -> None:
        assert row["status"] == "matched" and row["error_kind"] == "sketch"
        assert not row["identical"]
        if true < FLOOR * (1 - 1e-9):
            assert (row["error"], row["error_uncertainty"]) == (FLOOR, 1.0)
            assert row["reason"] == "no difference seen by the sketch"
        elif true > FLOOR * (1 + 1e-9):
            assert close(row["error"], true, 1e-9)
            assert close(row["error_uncertainty"], 1 / math.sqrt(2 * lengths[0]))

    _add(made, name, leaves[0], leaves[1], check)


def _alone(rng: random.Random, name: str, made: Pair) -> None:
    leaf = _leaf("float32", [2], Max=1.0, Min=0.0, Mean=0.5, Norm=1.0)
    target = rng.random() < 0.5

    def check(row: Row) -> None:
        assert row["status"] == ("target_only" if target else "benchmark_only")
        assert row["error"] is None and not row["identical"]

    _add(made, name, None if target else leaf, leaf if target else None, check)


def _shape(rng: random.Random, name: str, made: Pair) -> None:
    shapes = rng.sample(([4], [2, 2], [8], [3], [0], [0, 3]), 2)
    leaves = [_leaf("float32", shape, Max=1.0, Min=0.0) for shape in shapes]

    def check(row: Row) -> None:
        assert row["status"] == "shape" and row["error"] is None and not row["identical"]

    _add(made, name, leaves[0], leaves[1], check)


def _nothing(rng: random.Random, name: str, made: Pair) -> None:
    """No statistics, on one side or both."""
    full = _leaf("float32", [2], Max=1.0, Min=0.0)
    leaves = rng.choice((
        (full, _leaf("float32", [2])), (_leaf("float32", [2]), full),
        (_leaf("float8_e5m2", [2]), _leaf("float8_e5m2", [2])),
    ))  # fmt: skip

    def check(row: Row) -> None:
        assert row["status"] == "matched" and row["error"] is None and row["error_kind"] is None
        assert "statistics" in row["reason"] and not row["identical"]

    _add(made, name, leaves[0], leaves[1], check)
