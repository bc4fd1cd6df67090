"""The comparison as msprobe's own table: its columns, its numbers, its verdict rules.

For those who know that table and its scripts. The numbers are msprobe 26.2's (``msprobe compare``,
``core/compare``) wherever those are right. Where its verdict is not to be trusted this table
differs on purpose: a record on one side only, of another dtype, or whose tensor cannot be read is
an ``error`` with a message, never a ``pass``, and records of the benchmark only are listed too.
NPU is the target, Bench the benchmark. ``rlprobe official-table`` runs msprobe itself.
"""

from __future__ import annotations

import polars as pl

from rlprobe.compare import measures
from rlprobe.compare.msprobe.rules import verdicts
from rlprobe.compare.scalars import NUMBERS
from rlprobe.dumps.schema import FLOATS

STATISTICS, MD5, TENSOR = "statistics", "md5", "tensor"

#: Our statistic, and msprobe's names of its value, difference and relative error.
_STATISTICS = (
    ("max", "max", "Max diff", "MaxRelativeErr"),
    ("min", "min", "Min diff", "MinRelativeErr"),
    ("mean", "mean", "Mean diff", "MeanRelativeErr"),
    ("norm", "l2norm", "L2norm diff", "NormRelativeErr"),
)
SIDES = (("NPU", "target"), ("Bench", "benchmark"))
N_A = "N/A"
STACKS = "NPU_Stack_Info"
_INTEGERS = tuple(f"torch.{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64))
_PLAIN = ("int", "float", "bool", "str", "list", "dict", "tuple")
#: Python's class of what a numpy scalar is in JSON, by its first letters.
_NUMPY = {
    name: "float" if name in FLOATS else "bool" if name == "bool_" else "int"
    for name in NUMBERS
    if name not in _PLAIN
}
#: Of this msprobe reads no value at all.
_FORMAT = "torch.memory_format"
_GROUP = "torch.ProcessGroup"
#: Arguments of collectives that name a rank.
_RANKS = r"(?:^|\.)(?:group_)?(?:src|dst)$"
_SIZES = ("torch.Size", "slice")


def task_of(records: pl.DataFrame) -> str:
    """Which of msprobe's three tables these records fill."""
    if records.get_column("data_name_target").null_count() < records.height:
        return TENSOR
    checksum = records.get_column("digest_target").str.contains("^(crc32|xor):")
    return MD5 if checksum.any() else STATISTICS


def table(
    records: pl.DataFrame, task: str | None = None, stacks: pl.Series | None = None
) -> pl.DataFrame:
    """msprobe's table of some records (columns of :data:`rlprobe.compare.writer.SCHEMA`).

    All cells are text, as in its CSV; numbers are written so that they read back exactly. Rows are
    in execution order.

    Args:
        records: what was compared.
        task: which of msprobe's three tables; None: the one that the records fill.
        stacks: a cell per record for the column NPU_Stack_Info, which is left out where none is.
    """
    task = task or task_of(records)
    frame = records.with_columns(
        [cell.alias(name) for name, cell in _basic().items()]
        + [
            _statistic(s, side).alias(f"{label} {name}")
            for label, side in SIDES
            for s, name, _, _ in _STATISTICS
        ]
    )
    columns = list(_basic())
    if task == STATISTICS:
        frame = frame.with_columns(
            cell for s, name, diff, rel in _STATISTICS for cell in _difference(s, name, diff, rel)
        )
        columns += [diff for _, _, diff, _ in _STATISTICS] + [rel for *_, rel in _STATISTICS]
    elif task == TENSOR:
        figures = _figures()
        frame = frame.with_columns(cell.alias(name) for name, cell in figures.items())
        columns += list(figures)
    if task == MD5:
        frame = frame.with_columns(
            _checksum("target").alias("NPU MD5"), _checksum("benchmark").alias("BENCH MD5")
        )
        columns += ["NPU MD5", "BENCH MD5"]
    else:
        columns += [f"{label} {name}" for label, _ in SIDES for _, name, _, _ in _STATISTICS]
    frame = verdicts(frame, task)
    columns += ["Requires_grad Consistent", "Result", "Err_message"]
    if stacks is not None and stacks.null_count() < len(stacks):
        frame = frame.with_columns(stacks.alias(STACKS))
        columns.append(STACKS)
    if task == TENSOR:
        pair = [pl.col(f"data_name_{side}").fill_null("-1") for _, side in SIDES]
        frame = frame.with_columns(pl.format("['{}', '{}']", *pair).alias("Data_name"))
        columns.append("Data_name")
    return frame.select(columns)


def _basic() -> dict[str, pl.Expr]:
    cells: dict[str, pl.Expr] = {}
    for title, cell in (
        ("Name", _name),
        ("Dtype", _dtype),
        ("Tensor Shape", _shape),
        ("Requires_grad", _requires_grad),
    ):
        for label, side in SIDES:
            cells[f"{label} {title}"] = cell(side).fill_null(N_A)
    return cells


def _name(side: str) -> pl.Expr:
    return pl.col(f"name_{side}")


def _dtype(side: str) -> pl.Expr:
    """msprobe names the Python class of a scalar's value; most other values are texts."""
    dtype = pl.col(f"dtype_{side}")
    kept = (
        pl.col(f"shape_{side}").is_not_null()
        | dtype.is_in([*_SIZES, "ellipsis", _GROUP])
        | pl.col("index").str.contains(_RANKS)
    )
    return (
        pl.when(kept)
        .then(dtype)
        .when((pl.col(f"value_{side}") == "None") | (dtype == _FORMAT))
        .then(pl.lit("<class 'NoneType'>"))
        .when(dtype.is_in([*_PLAIN, *_NUMPY]))
        .then(pl.format("<class '{}'>", dtype.replace(_NUMPY)))
        .when(dtype.is_not_null())
        .then(pl.lit("<class 'str'>"))
    )


def _shape(side: str) -> pl.Expr:
    shape, dtype = pl.col(f"shape_{side}"), pl.col(f"dtype_{side}")
    return (
        pl.when(shape.is_not_null())
        .then(pl.format("[{}]", shape.cast(pl.List(pl.String)).list.join(", ")))
        .when(dtype == "torch.Size")
        .then(pl.col(f"value_{side}"))
        .when(dtype == "slice")
        .then(pl.lit("(3,)"))
        .when(dtype.is_not_null())
        .then(pl.lit("[]"))
    )


def _requires_grad(side: str) -> pl.Expr:
    flag = pl.col(f"requires_grad_{side}")
    return pl.when(flag).then(pl.lit("True")).when(~flag).then(pl.lit("False"))


def _statistic(statistic: str, side: str) -> pl.Expr:
    """A statistic's cell: exact text, ``None`` where there is none."""
    number, dtype = pl.col(f"{statistic}_{side}"), pl.col(f"dtype_{side}")
    value = pl.col(f"value_{side}")
    tensor = pl.col(f"shape_{side}").is_not_null()
    text = (
        pl.when(number.is_nan())
        .then(pl.lit("Nan"))
        .when(number == float("inf"))
        .then(pl.lit(" inf"))
        .when(number == float("-inf"))
        .then(pl.lit(" -inf"))
        .when(number.is_null())
        .then(None)
        .when(dtype == "torch.bool")
        .then(pl.when(number != 0).then(pl.lit("True")).otherwise(pl.lit("False")))
        .when(dtype.is_in(_INTEGERS))
        .then(number.cast(pl.Int64, strict=False).cast(pl.String))
        .otherwise(number.cast(pl.String))
    )
    if statistic in ("max", "min"):
        # integers that a float64 cannot hold are kept as text
        exact = value.str.extract(rf'"{statistic.capitalize()}": (-?\d+)')
        text = pl.when(tensor & exact.is_not_null()).then(exact).otherwise(text)
    spelled = pl.col(f"value_{side}").replace({"nan": "Nan", "inf": " inf", "-inf": " -inf"})
    return (
        pl.when(pl.col(f"order_{side}").is_null())
        .then(pl.lit(N_A))
        .when(tensor)
        .then(text)
        .when(dtype.is_in([*_SIZES, _FORMAT]))
        .then(None)
        .otherwise(spelled)
        .fill_null("None")
    )


#: msprobe's classes of a cell, in its order of asking.
_NAN, _INF, _NEG_INF, _NUMBER, _DEVICE, _MISSING, _OTHER = range(7)


def _class(cell: pl.Expr) -> pl.Expr:
    text = cell.str.strip_chars()
    return (
        pl.when(text.str.to_lowercase() == "nan")
        .then(_NAN)
        .when(text == "inf")
        .then(_INF)
        .when(text == "-inf")
        .then(_NEG_INF)
        .when(text.cast(pl.Float64, strict=False).is_not_null())
        .then(_NUMBER)
        .when(text.str.contains("(?i)npu|cpu|cuda"))
        .then(_DEVICE)
        .when(text == N_A)
        .then(_MISSING)
        .otherwise(_OTHER)
    )


def _difference(statistic: str, name: str, diff: str, rel: str) -> list[pl.Expr]:
    """Difference and relative error as msprobe writes them (``12.3%``, ``inf``, ``Diff``, …)."""
    npu, bench = pl.col(f"NPU {name}"), pl.col(f"Bench {name}")
    n, b = npu.cast(pl.Float64, strict=False), bench.cast(pl.Float64, strict=False)
    kind_n, kind_b = _class(npu), _class(bench)
    numeric = (kind_n <= _NUMBER) & (kind_b <= _NUMBER)
    # integers beyond float64's reach: the difference was taken exactly
    difference = (
        pl.when(pl.col("value_target").is_not_null())
        .then(pl.coalesce(f"{statistic}_diff", n - b))
        .otherwise(n - b)
    )
    percent = (
        pl.when(b == 0)
        .then(pl.lit("inf"))
        .otherwise((difference / b * 100).abs().cast(pl.String) + "%")
    )

    def rule(when_numbers: pl.Expr) -> pl.Expr:
        return (
            pl.when(npu == bench)
            .then(pl.lit("0"))
            .when((kind_n == _NUMBER) & (kind_b == _NUMBER))
            .then(when_numbers)
            .when((kind_n == _MISSING) | (kind_b == _MISSING))
            .then(pl.lit(N_A))
            .when(numeric & ((kind_n == _NAN) | (kind_b == _NAN)))
            .then(pl.lit("Nan"))
            .when(numeric & (kind_n == _INF))
            .then(pl.lit("inf"))
            .when(numeric & (kind_n == _NEG_INF))
            .then(pl.lit("-inf"))
            .when(numeric & (kind_b == _INF))
            .then(pl.lit("-inf"))
            .when(numeric & (kind_b == _NEG_INF))
            .then(pl.lit("inf"))
            .when((kind_n == _DEVICE) & (kind_b == _DEVICE))
            .then(pl.lit(N_A))
            .otherwise(pl.lit("Diff"))
        )

    return [rule(difference.cast(pl.String)).alias(diff), rule(percent).alias(rel)]


def _checksum(side: str) -> pl.Expr:
    """msprobe's md5 field; for scalars it takes the CRC-32 of the value's text itself."""
    digest = pl.col(f"digest_{side}").str.replace("^(crc32|xor):", "")
    value = pl.col(f"value_{side}")
    scalar = pl.col(f"shape_{side}").is_null() & pl.col(f"dtype_{side}").is_not_null()
    return (
        # a checksum of 0.0 counts as none with msprobe, which then takes that of an empty text
        pl.when(digest == "0.0")
        .then(pl.lit("00000000"))
        .when(digest.is_not_null())
        .then(digest)
        .when(scalar)
        .then(value.map_elements(_crc32, return_dtype=pl.String))
        .fill_null(N_A)
    )


def _crc32(text: str) -> str:
    import zlib

    return f"{zlib.crc32(text.encode()):08x}"


def _figures() -> dict[str, pl.Expr]:
    """The elementwise columns; msprobe rounds to 12 decimals, a cosine near 1 to 6."""
    measured = pl.col("max_abs_err").is_not_null()
    known = pl.col("identical") & (pl.col("error_kind") == measures.DIGEST).fill_null(False)
    same_file = known & ~measured & pl.col("data_name_target").is_not_null()
    elements = pl.col("shape_target").list.eval(pl.element().product()).list.first().fill_null(1)
    single = elements == 1
    cosine = pl.col("cosine")
    cosine = pl.when(cosine > 0.9999).then(cosine.round(6)).otherwise(cosine.round(12))

    def cell(value: pl.Expr, equal: float, *, single_too: bool = False) -> pl.Expr:
        unlike = (pl.col("status") == measures.NONFINITE) & pl.col("error").is_null()
        answered = (measured & ~unlike) | same_file
        if not single_too:
            answered &= ~single
        return (
            pl.when(answered & same_file)
            .then(pl.lit(str(equal)))
            .when(answered)
            .then(value.cast(pl.String))
            .when(pl.col("status") == measures.SHAPE)
            .then(pl.lit("shape unmatched"))
            .when(unlike)
            .then(pl.lit(N_A))
            .otherwise(pl.lit("unsupported"))
            .fill_null("Nan")
        )

    return {
        "Cosine": cell(cosine, 1.0),
        "EucDist": cell(pl.col("euclidean"), 0.0),
        "MaxAbsErr": cell(pl.col("max_abs_err").round(12), 0.0, single_too=True),
        "MaxRelativeErr": cell(pl.col("max_rel_err").round(12), 0.0, single_too=True),
        "One Thousandth Err Ratio": cell(pl.col("within_1e3").round(12), 1.0),
        "Five Thousandths Err Ratio": cell(pl.col("within_5e3").round(12), 1.0),
    }
