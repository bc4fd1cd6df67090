"""Where training and the inference engine part: in weights, prompts and generated tokens.

A record of one forward pass is held against what round-off allows: two programs that compute the
same differ by a few roundings an operation, which add up like a random walk, so that the relative
difference of the n-th record of a pass stays below ``_ROUNDINGS * u * sqrt(n + 1)`` with the unit
round-off ``u`` of the coarser side. Other kernels, fused or not, stay within it: the largest ratio
of a real vLLM and Hugging Face, fp32, was 0.46 (docs/compare.md).

A record of a few numbers, as a gate gives for one decoded token, is held against its usual size
(:mod:`rlprobe.judge.excuses.few_numbers`). What a tensor-parallel rank has of a tensor, 1 / n of
its numbers, may have all of the whole's difference and has 1 / sqrt(n) of its norm.

The first record beyond it, of passes that agree up to it, is where a difference begins.

Weights are sent, not computed: the engine's are the trainer's, rounded once where it keeps them in
a shorter format.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rlprobe.compare import measures
from rlprobe.judge import roundoff
from rlprobe.judge.excuses import few_numbers

PREFILL, DECODE = "prefill", "decode"
_ROUNDINGS = 16.0
#: Relative difference of equal weights by sketches that were added up otherwise.
_SKETCHED = 1e-6


@dataclass(frozen=True)
class Weights:
    """How the engine's weights stand to the trainer's at one step."""

    step: int
    compared: int
    #: The first that is another, in the engine's order: its module and relative difference.
    first: tuple[str, float] | None
    #: Modules whose weights are others.
    wrong: tuple[str, ...]
    #: Recorded of the engine, and not compared.
    left: int

    def __str__(self) -> str:
        left = f"; {self.left} could not be compared" if self.left else ""
        if self.first is None:
            return f"weights of step {self.step}: {self.compared} are the trainer's{left}"
        module, error = self.first
        return (
            f"weights of step {self.step}: {len(self.wrong)} modules of the engine have others "
            f"than the trainer's ({self.compared} weights were compared), first {module}: "
            f"relative difference {error:.2g}{left}"
        )


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


def allowed(unit: float, number: int) -> float:
    """What round-off allows of a pass's record, by its number from 0."""
    return float(_ROUNDINGS * unit * (number + 1) ** 0.5)


def weights(records: pl.DataFrame) -> list[Weights]:
    """Every step's weights, where the engine's were recorded.

    Args:
        records: ``train_infer/records.parquet``.
    """
    own = records.filter(
        (pl.col("slot") == "parameters") & (pl.col("status") != measures.TARGET_ONLY)
    ).sort("rank", "order_benchmark")
    measured = pl.col("error_kind").is_not_null()
    # what is sketched differs by the sketches' own accumulation
    seen = pl.when(pl.col("error_kind") == measures.SKETCH).then(_SKETCHED).otherwise(0.0)
    rounded = pl.when(pl.col("dtype_benchmark") == pl.col("dtype_target")).then(0.0)
    allowed = pl.max_horizontal(seen, rounded.otherwise(_unit()))
    wrong = (pl.col("status") == measures.NONFINITE) | (pl.col("error") > allowed).fill_null(False)
    found = []
    for step in own.get_column("step").unique().sort():
        rows = own.filter(step=step)
        others = rows.filter(wrong)
        first = others.row(0, named=True) if others.height else None
        found.append(
            Weights(
                int(step),
                rows.filter(measured).height,
                None if first is None else (first["module"], float(first["error"] or 0.0)),
                tuple(others.get_column("module").unique(maintain_order=True)),
                rows.filter(~measured & (pl.col("status") != measures.NONFINITE)).height,
            )
        )
    return found


def _unit() -> pl.Expr:
    """The unit round-off of the coarser side; null where a type has none."""
    units = [roundoff.unit(f"dtype_{side}") for side in ("benchmark", "target")]
    known = pl.all_horizontal(unit.is_not_null() for unit in units)
    return pl.when(known).then(pl.max_horizontal(units))


def parts(records: pl.DataFrame) -> list[Part]:
    """Prompts and generated tokens, each where there are any.

    Args:
        records: ``train_infer/records.parquet``.
    """
    measured = records.filter(
        (pl.col("slot") != "parameters") & (pl.col("error_kind") == measures.TENSOR)
    ).with_columns(
        number=pl.col("name_benchmark").str.extract(r"\.forward\.(\d+)\.").cast(pl.Int64),
        unit=_unit(),
        # [tokens, …] or [rows, tokens, …]: all dimensions but the last
        rows=pl.col("shape_benchmark").list.slice(0, pl.col("shape_benchmark").list.len() - 1),
    )
    passes = ["step", "rank", "number"]
    one_token = pl.col("rows").list.max().min().over(passes) == 1
    judged = (
        measured.filter(pl.col("unit").is_not_null())
        .with_columns(phase=pl.when(one_token).then(pl.lit(DECODE)).otherwise(pl.lit(PREFILL)))
        .sort("step", "rank", "order_benchmark")
    )
    turn = pl.int_range(pl.len()).over(passes)
    roundings = _ROUNDINGS * (turn + 1).cast(pl.Float64).sqrt() * few_numbers.cancelled() * _piece()
    judged = judged.with_columns(ratio=pl.col("error") / (pl.col("unit") * roundings)).with_columns(
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


def _piece() -> pl.Expr:
    """By how much the round-off of a rank's piece may be larger than the whole's; 1 of a whole."""
    held, whole = (pl.col(f"shape_{side}").list.last() for side in ("benchmark", "target"))
    return (whole / held).clip(lower_bound=1.0).fill_nan(1.0).fill_null(1.0).sqrt()


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
