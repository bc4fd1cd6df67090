"""Element types: how they lie in a file, and how they become numbers.

bfloat16 and the formats of 8 and 4 bits do not exist in numpy; they are kept as raw integers and
decoded exactly (every value of theirs is a float32).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

#: Scales of the MX formats: powers of two without sign. Two 4-bit floats in a byte, low one first.
E8M0, FP4 = "float8_e8m0fnu", "float4_e2m1fn_x2"


@dataclass(frozen=True)
class DType:
    """An element type as it is stored."""

    #: torch's name without ``torch.``.
    name: str
    #: The numpy type of the raw elements.
    raw: np.dtype
    #: ``float`` (sign-magnitude formats), ``int`` or ``complex``.
    kind: str
    #: Largest finite magnitude; None where saturation means nothing.
    limit: float | None = None

    @property
    def size(self) -> int:
        return self.raw.itemsize

    @property
    def numbers(self) -> int:
        """Numbers in one stored element: complex ones have two, packed 4-bit floats too."""
        return 2 if self.kind == "complex" or self.name == FP4 else 1

    @property
    def in_numpy(self) -> bool:
        """Whether numpy has the type, so that its own files can hold it."""
        return self.name != "bfloat16" and not (self.kind == "float" and self.size == 1)

    @property
    def large_integers(self) -> bool:
        """Whether it holds integers that no float64 holds."""
        return self.kind == "int" and self.size == 8

    @property
    def narrow(self) -> bool:
        """Whether float32 holds every value exactly, so that float32 arithmetic is msprobe's."""
        return self.kind == "float" and self.size <= 4


def _float(name: str, raw: str, limit: float) -> DType:
    return DType(name, np.dtype(raw), "float", limit)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _float("float64", "<f8", float(np.finfo(np.float64).max)),
        _float("float32", "<f4", float(np.finfo(np.float32).max)),
        _float("float16", "<f2", 65504.0),
        _float("bfloat16", "<u2", float.fromhex("0x1.fep127")),
        _float("float8_e4m3fn", "u1", 448.0),
        _float("float8_e5m2", "u1", 57344.0),
        _float("float8_e4m3fnuz", "u1", 240.0),
        _float("float8_e5m2fnuz", "u1", 57344.0),
        _float(E8M0, "u1", 2.0**127),
        _float(FP4, "u1", 6.0),
        *(
            DType(name, np.dtype(raw), "int")
            for name, raw in (
                ("int64", "<i8"),
                ("int32", "<i4"),
                ("int16", "<i2"),
                ("int8", "i1"),
                ("uint8", "u1"),
                ("uint16", "<u2"),
                ("uint32", "<u4"),
                ("uint64", "<u8"),
                ("bool", "u1"),
            )
        ),
        DType("complex64", np.dtype("<c8"), "complex"),
        DType("complex128", np.dtype("<c16"), "complex"),
    )
}

#: torch's typed storages, as pickles of tensors name them.
STORAGES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


def numbers(raw: Array, dtype: DType, wide: bool) -> Array:
    """Raw elements as float32 (exact for narrow types) or float64; several of an element flat."""
    if dtype.kind == "complex":
        raw = np.ascontiguousarray(raw).view(np.float32 if dtype.size == 8 else np.float64)
    elif dtype.name == "bfloat16":
        raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif dtype.name == FP4:
        raw = _FLOAT4[_nibbles(raw)]
    elif dtype.name == E8M0:
        raw = _e8m0()[raw]
    elif dtype.name.startswith("float8"):
        raw = _float8(dtype.name)[raw]
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return raw.astype(np.float64 if wide else np.float32, copy=False)


#: The OCP E2M1 format by its 4 bits.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOAT4 = np.concatenate([_FLOAT4, -_FLOAT4])


def _nibbles(raw: Array) -> npt.NDArray[np.uint8]:
    codes = np.ascontiguousarray(raw).view(np.uint8)
    return np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(-1)


@cache
def _e8m0() -> npt.NDArray[np.float32]:
    """All values of OCP E8M0: ``2 ** (code - 127)``, 255 is NaN."""
    values = np.exp2(np.arange(256, dtype=np.float64) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


@cache
def _float8(name: str) -> npt.NDArray[np.float32]:
    """All 256 values of a float8 format (OCP FP8 specification; fnuz: one NaN, no -0, no Inf)."""
    exponent_bits = 4 if "e4m3" in name else 5
    mantissa_bits = 7 - exponent_bits
    fnuz = name.endswith("fnuz")
    bias = (1 << (exponent_bits - 1)) - (0 if fnuz else 1)
    values = np.empty(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = code & ((1 << mantissa_bits) - 1)
        top = (1 << exponent_bits) - 1
        if (fnuz and code == 0x80) or (name == "float8_e4m3fn" and code & 0x7F == 0x7F):
            value = np.nan
        elif name == "float8_e5m2" and exponent == top:
            value = sign * np.inf if mantissa == 0 else np.nan
        elif exponent == 0:
            value = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        values[code] = value
    return values


def keys(raw: Array, dtype: DType) -> Array | None:
    """Integers of which neighbours are neighbouring representable values; None for complex."""
    if dtype.kind == "complex":
        return None
    if dtype.kind == "int":
        return raw
    if dtype.name == E8M0:
        return raw.astype(np.int16)
    if dtype.name == FP4:
        codes = _nibbles(raw)
        return ((codes & 7) | ((codes & 8) << 4)).view(np.int8)
    return raw.view(np.dtype(f"<i{dtype.size}"))
