"""Unit round-offs of number formats, and what one operation adds to a relative error.

The unit round-off u of a binary format with p significant bits is 2**-p: the largest relative
error of one correctly rounded operation (N. Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed. 2002, section 2.1). Products of 16 and 8 bit formats are summed in fp32 by
every device this compares, so a sum of n such products adds round-off of fp32, and one rounding
of the format itself when it is stored.
"""

from __future__ import annotations

import polars as pl

FP64, FP32 = 2.0**-53, 2.0**-24

#: Unit round-off by dtype as a dump names it; Python's and numpy's scalars come from fp32 tensors.
UNIT: dict[str, float] = {
    "torch.float64": FP64,
    "torch.float32": FP32,
    "torch.float16": 2.0**-11,
    "torch.bfloat16": 2.0**-8,
    "torch.float8_e4m3fn": 2.0**-4,
    "torch.float8_e4m3fnuz": 2.0**-4,
    "torch.float8_e5m2": 2.0**-3,
    "torch.float8_e5m2fnuz": 2.0**-3,
    # OCP Microscaling Formats (MX) Specification v1.0, 2023: FP4 has one bit of mantissa (5.3.3),
    # a scale none (5.4.1), and is the power of two below what it stands for (6.3), not the nearest
    "torch.float4_e2m1fn_x2": 2.0**-2,
    "torch.float8_e8m0fnu": 2.0**-1,
    # real and imaginary parts are rounded each, so that their vector is as close as they are
    "torch.complex128": FP64,
    "torch.complex64": FP32,
    "torch.complex32": 2.0**-11,
    "float": FP32,
    "float64": FP32,
    "float32": FP32,
    "float16": 2.0**-11,
}

#: Formats of so few numbers that to round to one is to decide: round-off tips it, and then the step
#: to the next number is as large as the number. Of the same numbers the same is chosen, bit by bit.
DECIDED = ("torch.float4_e2m1fn_x2", "torch.float8_e8m0fnu")

#: Round-offs of the elementary operations in a module that sums nothing (a normalisation, an
#: activation, a table of sines): a division, a root or an exponential is good to 1 or 2 ulp.
ELEMENTARY = 4.0
#: Likewise for a rotary table of 16 or 8 bits: sines and cosines of angles in fp32, rounded once to
#: nearest (u**2 / 6 in the mean on either side), and the same but where fp32 falls the other way:
#: how often it does is :mod:`rlprobe.judge.noise`'s.
TABLE = 1 / 16
#: Likewise for a sum of products: the result is rounded once to the stored format, and partial sums
#: or a bias that one side adds apart once more each. Rounding to nearest has a variance of at most
#: u**2 / 3, so this is three of them.
STORED = 1.0


def unit(dtype: str) -> pl.Expr:
    """Unit round-off of a column of dtype names; null for integers, booleans and unknown ones."""
    return pl.col(dtype).replace_strict(UNIT, default=None, return_dtype=pl.Float64)


def accumulation(stored: pl.Expr) -> pl.Expr:
    """Unit round-off of the sums behind values stored with round-off ``stored``."""
    return pl.when(stored < FP32).then(stored).otherwise(FP32)


def variance(
    stored: pl.Expr, terms: pl.Expr, products: float = 0.0, roundings: pl.Expr | float = ELEMENTARY
) -> pl.Expr:
    """Relative variance that one operation adds, for sums of ``terms`` products.

    Rounding errors of a sum of n terms behave like a random walk: the error grows with sqrt(n) u
    where the worst case grows with n u (N. Higham, T. Mary, A new approach to probabilistic
    rounding error analysis, SIAM J. Sci. Comput. 41, 2019).

    Args:
        stored: unit round-off of the result's format.
        terms: length of the reduction; 0 where nothing is summed.
        products: unit round-off of the factors where a device rounds them first (TF32, HF32).
        roundings: of the stored format, in multiples of ``stored**2``.
    """
    summed = accumulation(stored)
    rounded = pl.when(terms > 0).then(2.0 * products**2).otherwise(0.0)
    return roundings * stored.pow(2) + terms * summed.pow(2) + rounded
