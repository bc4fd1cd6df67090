"""What neither side recorded, and a run of its kind has: agreement of nothing is none.

What one side alone has is said by the items that compare it. What both lack leaves no trace in any
comparison, so it is asked for here, from what both runs declare (:data:`_RECORDS`,
:data:`_KEY_DATA`): a capture that was to have it and has not lost it on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import polars as pl

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat
from rlprobe.judge import keydata, layers
from rlprobe.judge.analysis import Finding
from rlprobe.judge.excuses import positions
from rlprobe.judge.extent import is_computed
from rlprobe.judge.row import columns_where
from rlprobe.said import SEMICOLON, Said, joined, listed, say
from rlprobe.store.read import Run

ITEM = "recorded at all"

_FORWARD = (pl.col("direction") == "forward") & (pl.col("slot") == "output")
#: Kinds of records: what they are called, which they are, and whether only an update has them.
_RECORDS: tuple[tuple[Said, pl.Expr, bool], ...] = (
    (say("results of modules"), _FORWARD, False),
    (say("gradients within the model"), pl.col("direction") == "backward", True),
    (say("gradients of parameters"), pl.col("slot").str.starts_with("grad"), True),
    (say("changes of parameters"), pl.col("slot") == "change", True),
    (say("losses"), pl.col("slot") == "loss", True),
)
#: Key data of each stage: one of these at least.
_KEY_DATA: dict[str, tuple[str, ...]] = {
    stages.REFERENCE: ("ref_log_prob", "ref_log_probs"),
    stages.TEACHER: ("teacher_log_probs",),
    stages.LOG_PROB: ("old_log_probs",),
    stages.VALUES: ("values",),
    stages.CRITIC_UPDATE: ("update_values", "given_returns", "returns"),
    stages.ACTOR_UPDATE: (keydata.ADVANTAGES,),
}
_NORM = "_grad_norm"


def check(evidence: Evidence) -> GateItem | None:
    """Item ``recorded at all``; None where nothing is lacking on both sides."""
    found = [
        *_records(evidence),
        *_layers(evidence),
        *_passes(evidence),
        *_key_data(evidence),
        *_samples(evidence),
        *_provenance(evidence),
        *_metrics(evidence),
    ]
    if not found:
        return None
    return caveat(
        ITEM,
        say("neither side has {found}", found=joined(found, SEMICOLON)),
        say(
            "their agreement was not judged; see the runs' logs for why a capture that was to have "
            "them has not"
        ),
    )


def _training(evidence: Evidence) -> dict[str, Finding]:
    """Stages of training that were captured and compared."""
    return {
        name: finding
        for name, finding in evidence.step.findings.items()
        if name in stages.TRAINING_STAGES
    }


def _both(evidence: Evidence) -> tuple[Run, Run]:
    return evidence.benchmark, evidence.target


def _records(evidence: Evidence) -> Iterator[Said]:
    for name, finding in _training(evidence).items():
        rows = finding.stage.rows
        for words, which, of_updates in _RECORDS:
            if (not of_updates or name in stages.UPDATE_STAGES) and not rows.select(
                which.fill_null(False).any()
            ).item():
                yield say("{what} of {stage}", what=words, stage=name)


def _layers(evidence: Evidence) -> Iterator[Said]:
    """Layers whose parameters a stage has and of which it recorded nothing forward."""
    digested = _digested(evidence)
    for name, finding in _training(evidence).items():
        rows = columns_where(finding.stage.rows, _FORWARD, "rank", "module")
        # of a pipeline's ranks some may be recorded, and of functions alone no module is known
        ranks = rows.get_column("rank").unique()
        own = digested.filter(
            (pl.col("stage") == name) & pl.col("rank").is_in(ranks.implode())
        ).select(module="name")
        ran = layers.of(rows)
        lost = sorted(layers.of(own) - ran)
        if ran and lost:
            yield say("results of layers {numbers} of {stage}", numbers=lost, stage=name)


def _passes(evidence: Evidence) -> Iterator[Said]:
    """Micro-batches and updates of which there are key data, or a norm, and no records."""
    number = evidence.step.number
    for name, finding in _training(evidence).items():
        if finding.stage.laid_out is not None:
            continue
        keys = [key for key, stage in keydata.OUTCOMES.items() if stage == name]
        # each side's micro-batches have partners as far as those of the side with fewer go
        cut = finding.stage.misplaced in (positions.SPLIT, positions.UNTOLD, positions.SPREAD)
        passes = _passed(evidence, keys, number, min if cut else max)
        norms = _passed(evidence, [stages.MODEL_ROLE[name] + _NORM], number, max)
        reported = _reported(evidence, name)
        for process in finding.stage.processes:
            rows = process.rows
            ran = rows.filter(_FORWARD).get_column("micro_batch").n_unique()
            if 0 < ran < passes.get(process.rank, 0):
                yield say(
                    "records of {lost} of {count} micro-batches of {stage}",
                    lost=passes[process.rank] - ran,
                    count=passes[process.rank],
                    stage=name,
                )
                break
            updates = rows.filter(pl.col("slot").str.starts_with("grad_"))
            held = updates.get_column("call").n_unique()
            made = max(norms.get(process.rank, 0), reported)
            if name in stages.UPDATE_STAGES and 0 < held < made:
                yield say(
                    "gradients of {lost} of {count} updates of {stage}",
                    lost=made - held,
                    count=made,
                    stage=name,
                )
                break


def _reported(evidence: Evidence, stage: str) -> int:
    """Updates of which the trainer reports a gradient norm each, under one name with the update's
    number behind it; 0 where it does not number them, or does not say whose they are."""
    trained = stages.UPDATE_STAGES & _training(evidence).keys()
    names = {
        name
        for run in _both(evidence)
        for line in run.metrics()
        if line.get("step") == evidence.step.number
        for name in line.get("metrics") or {}
        if "grad_norm" in name and (len(trained) == 1 or stages.MODEL_ROLE[stage] in name)
    }
    numbers = [number for name in names if (number := name.rpartition("@")[2]).isdigit()]
    return max((int(number) + 1 for number in numbers), default=0)


def _passed(
    evidence: Evidence, keys: Sequence[str], step: int, of_sides: Callable[[int, int], int]
) -> dict[int, int]:
    """By rank, micro-batches in which any of these was saved; ``of_sides`` of two sides' most."""
    found: dict[int, int] = {}
    for data in (run.recorded for run in _both(evidence)):
        own: dict[int, int] = {}
        for key in keys:
            saved = {} if data is None else data.micro_steps(key, step)
            own |= {rank: max(count, own.get(rank, 0)) for rank, count in saved.items()}
        found |= {rank: of_sides(count, found.get(rank, count)) for rank, count in own.items()}
    return found


def _digested(evidence: Evidence) -> pl.DataFrame:
    """Stage and name of every parameter that either side digested at the step."""
    tables = [table for run in _both(evidence) if (table := run.weights()) is not None]
    here = pl.col("step") == evidence.step.number
    if not tables:
        return pl.DataFrame(schema={"stage": pl.String, "name": pl.String, "rank": pl.Int32})
    return pl.concat(table.filter(here).select("stage", "name", "rank") for table in tables)


def _key_data(evidence: Evidence) -> Iterator[Said]:
    runs = _both(evidence)
    if not all((run.manifest.declared.get("capture") or {}).get("key_data") for run in runs):
        return
    there = {
        name
        for run in runs
        for name in keydata.names(run)
        if keydata.is_there(run, name, evidence.step.number)
    }
    for stage in _training(evidence):
        wanted = _KEY_DATA.get(stage, ())
        if wanted and there.isdisjoint(wanted):
            yield say("key data {names} of {stage}", names=listed(wanted, 1), stage=stage)


def _samples(evidence: Evidence) -> Iterator[Said]:
    """Key data of fewer samples than the stage worked on."""
    for called, difference in sorted(evidence.step.key_data.items()):
        name, stage = called.removesuffix(keydata.LATER), keydata.stage_of(called)
        if stage not in _training(evidence):
            continue
        lost = min(_lost(run, name, stage, evidence.step.number) for run in _both(evidence))
        if lost and difference.joined and called == name:
            yield say("{name} of {count} samples of {stage}", name=name, count=lost, stage=stage)


def _lost(run: Run, name: str, stage: str, step: int) -> int:
    """Samples that a stage worked on, and of which a key has no row."""
    held = frozenset[str | None]() if run.recorded is None else run.recorded.samples(name, step)
    proof = {
        sample
        for entry in run.mock_proof() or []
        if entry["stage"] == stage and entry["step"] == step
        for sample in entry["samples"]
    }
    # where none is among them, or one has no name, these are not named as the proof names them
    return 0 if None in held or held.isdisjoint(proof) else len(proof - held)


def _provenance(evidence: Evidence) -> Iterator[Said]:
    """Stages without proof of their samples, or digests of their weights, and lone parameters."""
    step, runs = evidence.step.number, _both(evidence)
    proved = {e["stage"] for run in runs for e in run.mock_proof() or [] if e["step"] == step}
    digested = _digested(evidence)
    weighed = set(digested.get_column("stage"))
    for stage, finding in _training(evidence).items():
        if proved and stage not in proved:
            yield say("samples of {stage}", stage=stage)
        if weighed and stage not in weighed:
            yield say("digests of the weights of {stage}", stage=stage)
            continue
        changed = finding.stage.rows.filter(pl.col("slot") == "change").get_column("name")
        own = set(digested.filter(pl.col("stage") == stage).get_column("name"))
        lone = sorted(set(changed.str.replace(r"\.change\.\d+.*$", "")) - own)
        if own and lone:
            yield say(
                "digests of {names} of {stage}, which change there",
                names=listed(lone, 2),
                stage=stage,
            )


def _metrics(evidence: Evidence) -> Iterator[Said]:
    """Numbers that a trainer reports of every step, and the norms that it clips by."""
    runs = _both(evidence)
    if not all(run.manifest.declared.get("framework") for run in runs):
        return
    names = {
        name
        for run in runs
        for line in run.metrics()
        if line.get("step") == evidence.step.number
        for name in line.get("metrics") or {}
        if is_computed(name)
    }
    if not names:
        yield say("metrics of the step")
    norms = {
        name
        for run in runs
        if (root := run.key_data()) is not None
        for name in (path.name for path in root.glob(f"*{_NORM}"))
        if keydata.is_there(run, name, evidence.step.number)
    }
    for stage in stages.UPDATE_STAGES & _training(evidence).keys():
        # a trainer of one model does not say whose norm it is
        others = {stages.MODEL_ROLE[other] for other in stages.UPDATE_STAGES - {stage}}
        own = [name for name in names | norms if "grad_norm" in name]
        if not any(all(other not in name for other in others) for name in own):
            yield say("a gradient norm of {stage}", stage=stage)
