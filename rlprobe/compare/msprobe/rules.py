"""msprobe's verdict rules (Result and Err_message), per API over its inputs and outputs.

Rules of msprobe 26.2 (``core/compare/indicator_analysis``): a non-finite extreme on the NPU only;
outputs that err by more than 50 % while inputs err by less than 10 % (norms), or 10 times as much
as the inputs; unequal requires_grad, scalars, dtypes or shapes; checksums that differ. Elementwise:
outputs of which less than 10 % are within 1e-3 while more than 90 % of the inputs are, and a cosine
that falls by more than 0.1. They say nothing about small differences, which is why ``error`` and
its floor exist; they are kept for comparability.
"""

from __future__ import annotations

import json

import polars as pl

from rlprobe.compare import measures

#: Calls whose values are not defined, and those whose inputs are not (msprobe's lists).
_ALL_IGNORED = (
    "empty",
    "empty_like",
    "numpy",
    "to",
    "__setitem__",
    "empty_with_format",
    "new_empty_strided",
    "new_empty",
    "empty_strided",
)
_INPUT_IGNORED = (
    "_reduce_scatter_base",
    "_all_gather_base",
    "all_to_all_single",
    "batch_isend_irecv",
)
_API = ("step", "rank", "module", "op", "call", "direction", "_grad", "_saved")
_N_A = "N/A"
_NONFINITE = ("nan", "inf", "-inf")

_Rule = tuple[str, pl.Expr, str]


def verdicts(frame: pl.DataFrame, task: str) -> pl.DataFrame:
    """Add ``Requires_grad Consistent``, ``Result`` and ``Err_message`` to a table with cells."""
    output = pl.col("NPU Name").str.contains(".output.", literal=True)
    update = pl.col("direction") == "update"
    called = pl.col("NPU Name").str.split(".").list.get(1, null_on_oob=True)
    frame = frame.with_columns(
        _output=output,
        _grad=pl.col("slot") == "grad",
        _saved=pl.when(update).then("index"),
        _called=called,
    )
    frame = frame.with_columns(
        _ignored=pl.col("_called").is_in(_ALL_IGNORED),
        _inputs_ignored=pl.col("_called").is_in(_INPUT_IGNORED),
        _first_output=pl.col("_output") & (pl.col("_output").cum_sum().over(_API) == 1),
    )
    if task == "md5":
        rules = _checksum_rules()
    else:
        frame = frame.with_columns(**_spreads(task))
        rules = [_nonfinite_rule(), *_difference_rules(task), *_common_rules(), *_late_rules(task)]
    rules = [*_own_rules(), *rules]
    levels = [pl.when(when).then(pl.lit(2 if level == "error" else 1)) for level, when, _ in rules]
    messages = [
        pl.when(when).then(pl.lit(json.dumps(f"{level}: {text}"))) for level, when, text in rules
    ]
    worst = pl.max_horizontal(levels).fill_null(0)
    return frame.with_columns(
        (pl.col("NPU Requires_grad") == pl.col("Bench Requires_grad"))
        .cast(pl.String)
        .str.to_titlecase()
        .alias("Requires_grad Consistent"),
        pl.when(worst == 2)
        .then(pl.lit("error"))
        .when(worst == 1)
        .then(pl.lit("warning"))
        .otherwise(pl.lit("pass"))
        .alias("Result"),
        pl.format("[{}]", pl.concat_list(messages).list.drop_nulls().list.join(", ")).alias(
            "Err_message"
        ),
    ).drop(pl.selectors.starts_with("_"))


def _own_rules() -> list[_Rule]:
    """What msprobe passes over in silence."""
    status = pl.col("status")
    return [
        ("error", status == measures.TARGET_ONLY, "No record of the bench matches."),
        ("error", status == measures.BENCHMARK_ONLY, "The NPU has no such record."),
        ("error", status == measures.UNREADABLE, "A tensor file could not be read."),
    ]


def _judged() -> pl.Expr:
    return ~pl.col("_ignored") & (~pl.col("_inputs_ignored") | pl.col("_output"))


def _nonfinite(cell: str) -> pl.Expr:
    return pl.col(cell).str.strip_chars().str.to_lowercase().is_in(_NONFINITE)


def _nonfinite_rule() -> _Rule:
    npu = _nonfinite("NPU max") | _nonfinite("NPU min")
    bench = _nonfinite("Bench max") | _nonfinite("Bench min")
    text = "There is nan/inf/-inf in the maximum or minimum value of NPU."
    return "error", _judged() & npu & ~bench, text


def _spreads(task: str) -> dict[str, pl.Expr]:
    """Per API, the worst figures of inputs and of outputs."""
    output = pl.col("_output")
    if task == "statistics":
        norm = pl.col("NormRelativeErr")
        percent = norm.str.strip_suffix("%").cast(pl.Float64, strict=False) / 100
        counted = pl.when(norm.str.ends_with("%")).then(percent)
        # in polars NaN is larger than any number, in msprobe's comparisons than none
        own = percent.fill_nan(None).fill_null(0)
        return {
            "_own": pl.when(norm == "inf").then(float("inf")).otherwise(own),
            "_in": pl.when(~output).then(counted).max().over(_API).fill_null(0),
            "_out": pl.when(output).then(counted).max().over(_API).fill_null(0),
        }
    cosine = pl.col("Cosine").cast(pl.Float64, strict=False).fill_nan(None)
    share = pl.col("One Thousandth Err Ratio").cast(pl.Float64, strict=False).fill_nan(None)

    def least(value: pl.Expr, where: pl.Expr) -> pl.Expr:
        return pl.min_horizontal(pl.when(where).then(value).min().over(_API), pl.lit(1.0))

    return {
        "_in": least(share, ~output),
        "_out": least(share, output),
        "_cosine_in": least(cosine, ~output),
        "_cosine_out": least(cosine, output),
    }


def _difference_rules(task: str) -> list[_Rule]:
    free = ~pl.col("_ignored") & ~pl.col("_inputs_ignored")
    if task == "statistics":
        when = free & pl.col("_output") & (pl.col("_in") < 0.1) & (pl.col("_own").abs() > 0.5)
        return [("error", when, "The NormRelativeErr of output is greater than 0.5.")]
    when = free & pl.col("_first_output") & (pl.col("_in") > 0.9) & (pl.col("_out") < 0.1)
    text = "The input/parameters of One Thousandth Err Ratio > 0.9 while the output < 0.6."
    return [("error", when, text)]


def _common_rules() -> list[_Rule]:
    matched = (pl.col("Bench Name") != _N_A) & (pl.col("NPU Name") != _N_A)
    judged = _judged() & matched
    free = ~pl.col("_ignored") & ~pl.col("_inputs_ignored") & matched

    def differ(title: str) -> pl.Expr:
        return pl.col(f"NPU {title}") != pl.col(f"Bench {title}")

    scalar = pl.col("NPU Dtype").str.contains("class") & pl.col("Bench Dtype").str.contains("class")
    npu, bench = pl.col("NPU max"), pl.col("Bench max")
    unequal = (npu != bench) & (
        npu.cast(pl.Float64, strict=False) != bench.cast(pl.Float64, strict=False)
    ).fill_null(True)
    fused = pl.col("Bench Name").str.contains("qkv|gate_up")
    return [
        (
            "error",
            judged & differ("Requires_grad"),
            "The Required_Grad of NPU and Bench are inconsistent",
        ),
        (
            "error",
            free & ~pl.col("_output") & scalar & (pl.col("NPU Tensor Shape") == "[]") & unequal,
            "The scalar parameters of NPU and Bench are inconsistent.",
        ),
        (
            "error",
            judged & ~fused & differ("Dtype"),
            "The dtype of NPU and Bench are inconsistent.",
        ),
        (
            "error",
            judged & differ("Tensor Shape"),
            "The shape of NPU and Bench are inconsistent.",
        ),
    ]


def _late_rules(task: str) -> list[_Rule]:
    free = ~pl.col("_ignored") & ~pl.col("_inputs_ignored") & pl.col("_first_output")
    if task == "statistics":
        grown = (
            pl.when(pl.col("_in") == 0)
            .then(pl.col("_out") > 0.1)
            .otherwise(pl.col("_out") / pl.col("_in") > 10)
        )
        text = "The norm relative error of output is 10 times that of input."
        return [("warning", free & grown, text)]
    fallen = (pl.col("_cosine_in") > 0.9) & (pl.col("_cosine_in") - pl.col("_cosine_out") > 0.1)
    text = "The input/parameters of Cosine > 0.9, and input/parameters - output > 0.1"
    return [("warning", free & fallen, text)]


def _checksum_rules() -> list[_Rule]:
    npu, bench = pl.col("NPU MD5"), pl.col("BENCH MD5")
    missing = (npu == _N_A) | (bench == _N_A)
    differ = _judged() & (npu != bench)
    return [
        (
            "error",
            differ & ~missing,
            "The CRC-32 value of NPU differs from that of the bench.",
        ),
        (
            "warning",
            differ & missing,
            "The parameter of NPU does not match the bench.",
        ),
    ]
