"""Where a stage parts first, over all of its processes."""

from __future__ import annotations

from rlprobe.judge import execution, keydata, layers, origin
from rlprobe.judge.analysis import OUTCOME
from rlprobe.judge.origin import Origin
from rlprobe.judge.outcomes import OTHER_FORMAT, Outcome
from rlprobe.judge.stage import Stage
from rlprobe.judge.stage_results import row_of
from rlprobe.said import of_side, say


def first_of(stage: Stage, produced: list[Outcome]) -> tuple[Origin | None, int | None]:
    """The earliest origin over all ranks; a result that differs comes after the forward records."""
    found = []
    for process in stage.processes:
        here = origin.find(process.rows, process.calls)
        if here is not None:
            row = here.row
            began = (row["update"], row["micro_batch"], row["phase"], row["sequence"])
            found.append((began, process.rank, here))
    beyond = [outcome for outcome in produced if outcome.excess > 1]
    # whatever parts in an update parts before what the next one hands on
    wrong = [o for o in beyond if not (found and o.name.endswith(keydata.LATER))]
    forward = [item for item in found if item[2].row["phase"] == execution.FORWARD]
    if wrong and not forward:
        worst = max(wrong, key=lambda outcome: outcome.excess)
        reason = say("all forward records agree within noise and {name} does not", name=worst.name)
        if worst.measure == OTHER_FORMAT:
            reason = say(
                "all forward records agree within noise, and {name} is of a shorter format than "
                "the benchmark's",
                name=worst.name,
            )
        if stage.misplaced:
            reason = say(
                "{name} differs, joined by sample; activations were not judged "
                "({misplaced}), so that no module can be named",
                name=worst.name,
                misplaced=stage.misplaced,
            )
        row = row_of(worst)
        if worst.lopsided:
            row |= {"status": "nonfinite", "reason": worst.side}
            agree = (
                say("activations were not judged") if stage.misplaced else say("all modules agree")
            )
            reason = say(
                "{name}: not finite at {lopsided:,} of {count:,} values on the {side} "
                "only; {agree}",
                name=worst.name,
                lopsided=worst.lopsided,
                count=worst.count,
                side=of_side(str(worst.side)),
                agree=agree,
            )
        return Origin(OUTCOME, None, worst.name, row, reason), stage.processes[0].rank
    if not found:
        return None, None
    if layers.apart([process.rows for process in stage.processes]):
        # what a pipeline rank was given by another is inherited where that one's own is found
        made = {item[2].row["phase"] for item in found if not origin.received(item[2])}
        found = [
            item
            for item in found
            if not origin.received(item[2]) or item[2].row["phase"] not in made
        ]
    _, rank, first = min(found, key=lambda item: (item[0], item[1]))
    return first, rank
