"""Whether the rows of two batches stand in the same places.

A trainer may reorder samples, or split a batch into other micro-batches. Activations of whole
micro-batches are then of other samples, and a difference between them says nothing. What does not
depend on the order remains to be judged: gradients after all micro-batches, changes of parameters,
and key data, which is joined by sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import polars as pl

from rlprobe import stages
from rlprobe.judge import execution, keydata
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.inputs import Results
from rlprobe.judge.reasons import OTHER_PLACES
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import Said, say

REORDERED = say("rows stand in another order")
SPLIT = say("micro-batches are split differently")
#: Other leading sizes of activations, of micro-batches that key data show to be the same.
SHAPED = say("the same micro-batches are laid out otherwise (packed, sequence first or divided)")
#: The same, where nothing says which samples a micro-batch holds.
UNTOLD = say("micro-batches are split, packed or laid out otherwise")
SPREAD = say("samples are spread over another number of ranks")
SHUFFLED = say("micro-batches hold other samples than on the benchmark")
#: Key data of each stage's own micro-batches, by which rows are known.
_OF_STAGE = {
    stages.REFERENCE: "ref_log_prob",
    stages.LOG_PROB: "old_log_probs",
    stages.VALUES: "values",
    stages.ACTOR_UPDATE: keydata.ADVANTAGES,
    stages.CRITIC_UPDATE: "given_returns",
}
#: Share of activations whose shapes differ in their leading sizes only, for a different split.
_MANY = 0.3


def difference(
    results: Results, stage: str, step: int, parts: Iterable[pl.DataFrame]
) -> Said | None:
    """How the two batches of a stage differ in the places of their rows; None where they don't.

    Args:
        results: where the runs' proofs are found.
        stage: canonical name.
        step: captured step, from 0.
        parts: the stage's rows in execution order, a frame a rank.
    """
    orders = []
    for role in (BENCHMARK, TARGET):
        run = results.run(role)
        proof = [] if run is None else run.mock_proof() or []
        orders.append(
            [
                (entry["rank"], sample)
                for entry in proof
                if entry["stage"] == stage and entry["step"] == step
                for sample in entry["samples"]
            ]
        )
    if all(orders) and _groups(orders[0]) != _groups(orders[1]):
        return SPREAD
    if _split(parts):
        return _of_sizes(results, stage, step)
    if _shuffled(results, stage, step):
        return SHUFFLED
    # Other samples altogether are the gate's business.
    same_set = sorted(s for _, s in orders[0]) == sorted(s for _, s in orders[1])
    return REORDERED if same_set and orders[0] != orders[1] else None


def _of_sizes(results: Results, stage: str, step: int) -> Said:
    """What other leading sizes of activations come from: the micro-batches, or how they lie.

    Sizes alone do not say it: Megatron's are sequence first, packed rows are one row, and ranks of
    sequence and context parallelism hold a stretch.
    """
    cuts = [_cuts(results, role, stage, step) for role in (BENCHMARK, TARGET)]
    if not all(cuts):
        return UNTOLD
    return SHAPED if cuts[0] == cuts[1] else SPLIT


def _cuts(results: Results, role: str, stage: str, step: int) -> set[frozenset[str]]:
    """The samples of each micro-batch, as a stage's key data say; empty where they do not."""
    run, name = results.run(role), _OF_STAGE.get(stage)
    held: dict[tuple[int, int], set[str]] = {}
    for row in [] if run is None or name is None else keydata.load(run, name, step):
        if row.sample is None:
            return set()
        held.setdefault((row.rank, row.micro_step), set()).add(row.sample)
    return {frozenset(samples) for samples in held.values()}


def _groups(order: list[tuple[int, str]]) -> int:
    """How many parts a batch is divided into: ranks of one model hold the same samples."""
    ranks: dict[int, list[str]] = {}
    for rank, sample in order:
        ranks.setdefault(rank, []).append(sample)
    return len({tuple(samples) for samples in ranks.values()})


def _shuffled(results: Results, stage: str, step: int) -> bool:
    """Whether the same samples come in micro-batches of another order, as their key data say.

    A proof has the order of the whole batch, before it was cut.
    """
    runs = [run for role in (BENCHMARK, TARGET) if (run := results.run(role)) is not None]
    name = _OF_STAGE.get(stage)
    if name is None or len(runs) < 2:
        return False
    orders = [[(row.rank, row.sample) for row in keydata.load(run, name, step)] for run in runs]
    if not orders[0] or any(sample is None for order in orders for _, sample in order):
        return False
    return orders[0] != orders[1] and Counter(orders[0]) == Counter(orders[1])


def _split(parts: Iterable[pl.DataFrame]) -> bool:
    """Whether many activations differ in size, each in its leading dimensions only."""
    counts = [_other_sizes(rows) for rows in parts]
    return sum(other for other, _ in counts) > _MANY * sum(moving for _, moving in counts)


def _other_sizes(rows: pl.DataFrame) -> tuple[int, int]:
    """Activations that differ in their leading dimensions only, and all with a partner."""
    columns = ["phase", "slot", "status", "shape_benchmark", "shape_target"]
    moving = rows.select(columns).filter(
        (pl.col("phase") == execution.FORWARD)
        & pl.col("slot").is_in(["input", "output"])
        & (pl.col("shape_benchmark").list.len() >= 2)
        # with fewer micro-batches on one side, most records of the other have no partner
        & pl.col("shape_target").is_not_null()
    )
    other = moving.filter(
        (pl.col("status") == "shape")
        & (pl.col("shape_benchmark").list.len() == pl.col("shape_target").list.len())
        & (pl.col("shape_benchmark").list.last() == pl.col("shape_target").list.last())
    )
    return other.height, moving.height


def of_losses(misplaced: str | None) -> list[Excuse]:
    """Leave out the losses of micro-batches that hold other samples; they stand in no other row."""
    if misplaced is None:
        return []
    return [Excuse(OTHER_PLACES, pl.col("phase") == execution.LOSS)]


def excuses(misplaced: str | None) -> list[Excuse]:
    """Leave out all that depends on which rows a micro-batch holds, where these differ.

    Args:
        misplaced: how, of :func:`difference`.
    """
    if misplaced is None:
        return []
    return [Excuse(OTHER_PLACES, pl.col("phase") < execution.GRADIENTS)]
