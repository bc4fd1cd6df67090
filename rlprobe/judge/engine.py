"""Where training and the inference engine part, in prompts and in generated tokens.

A record of one forward pass is held against what round-off allows: two programs that compute the
same differ by a few roundings an operation, which add up like a random walk, so that the relative
difference of the n-th record of a pass stays below ``_ROUNDINGS * u * sqrt(n + 1)`` with the unit
round-off ``u`` of the coarser side. Other kernels, fused or not, stay within it: the largest ratio
of a real vLLM and Hugging Face, fp32, was 0.4 (docs/compare.md).

The first record beyond it, of passes that agree up to it, is where a difference begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rlprobe.compare import measures

PREFILL, DECODE = "prefill", "decode"
_ROUNDINGS = 16.0
#: Unit round-off by recorded dtype; what is not listed is not judged.
_UNITS = {
    "torch.float64": 2.0**-53,
    "torch.float32": 2.0**-24,
    "torch.float16": 2.0**-11,
    "torch.bfloat16": 2.0**-8,
}


@dataclass(frozen=True)
class Part:
    """What was judged of prompts, or of generated tokens."""

    phase: str
    #: Forward passes and their records that were held against round-off.
    passes: int
    records: int
    #: The largest ratio of a difference to what round-off allows.
    worst: float
    #: Passes in which a record is beyond it.
    beyond: int
    #: The first of them in execution order: its name in the engine, module, ratio and error.
    first: tuple[str, str, float, float] | None

    def __str__(self) -> str:
        counted = f"{self.phase}: {self.records} records of {self.passes} forward passes"
        if self.first is None:
            return (
                f"{counted}, none beyond what round-off allows (the nearest at {self.worst:.2g} "
                "of it)"
            )
        name, module, ratio, error = self.first
        return (
            f"{counted}; training and engine part in {self.beyond} of them, first at {module} "
            f"({name}): relative difference {error:.2g}, {ratio:.3g} times what round-off allows"
        )


def parts(records: pl.DataFrame) -> list[Part]:
    """Prompts and generated tokens, each where there are any.

    Args:
        records: ``train_infer/records.parquet``.
    """
    units = [
        pl.col(f"dtype_{side}").replace_strict(_UNITS, default=None, return_dtype=pl.Float64)
        for side in ("benchmark", "target")
    ]
    measured = records.filter(
        (pl.col("slot") != "parameters") & (pl.col("error_kind") == measures.TENSOR)
    ).with_columns(
        number=pl.col("name_benchmark").str.extract(r"\.forward\.(\d+)\.").cast(pl.Int64),
        unit=pl.when(pl.all_horizontal(unit.is_not_null() for unit in units)).then(
            pl.max_horizontal(units)
        ),
        phase=pl.when(pl.col("shape_benchmark").list.first() == 1)
        .then(pl.lit(DECODE))
        .otherwise(pl.lit(PREFILL)),
    )
    judged = measured.filter(pl.col("unit").is_not_null()).sort("step", "rank", "order_benchmark")
    passes = ["step", "rank", "number"]
    turn = pl.int_range(pl.len()).over(passes)
    judged = judged.with_columns(
        ratio=pl.col("error") / (_ROUNDINGS * pl.col("unit") * (turn + 1).cast(pl.Float64).sqrt())
    ).with_columns(
        # what is not finite on one side only is no small difference
        ratio=pl.when(pl.col("status") == measures.NONFINITE)
        .then(float("inf"))
        .otherwise(pl.col("ratio").fill_nan(float("inf")))
    )
    return [
        _part(phase, judged.filter(phase=phase), passes)
        for phase in (PREFILL, DECODE)
        if judged.filter(phase=phase).height
    ]


def _part(phase: str, rows: pl.DataFrame, passes: list[str]) -> Part:
    beyond = rows.filter(pl.col("ratio") > 1)
    first = None
    if beyond.height:
        # of every pass its first, of these the one that comes first in the model
        began = beyond.group_by(passes, maintain_order=True).first()
        modules = rows.get_column("module").unique(maintain_order=True).to_list()
        row = min(began.iter_rows(named=True), key=lambda r: modules.index(r["module"]))
        first = (
            row["name_benchmark"],
            row["module"],
            float(row["ratio"]),
            float(row["error"] or 0),
        )
    return Part(
        phase,
        rows.select(passes).n_unique(),
        rows.height,
        float(rows.get_column("ratio").max() or 0.0),  # type: ignore[arg-type]
        beyond.select(passes).n_unique(),
        first,
    )
