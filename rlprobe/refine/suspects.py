"""From a diagnosis to what is to be looked at again."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import msgspec
import polars as pl

from rlprobe import stages
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.first import NO_COUNTERPART
from rlprobe.documents import structfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import DumpError, UsageError
from rlprobe.files import replace_bytes
from rlprobe.judge import analysis, execution, forced, keydata, tables
from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import OUTCOME, Finding
from rlprobe.judge.inputs import Results, require
from rlprobe.judge.outcomes import OTHER_FORMAT
from rlprobe.judge.row import Row, first
from rlprobe.refine.blocks import blocks
from rlprobe.roles import BENCHMARK, REPEAT, TARGET
from rlprobe.spec import Suspects
from rlprobe.store.read import Run, runs

NAME = "suspects.json"
FORMAT = 1
#: Whose operators are traced (:data:`rlprobe.capture.session.CaptureOptions.trace`).
MODULE, OUTPUTS, UPDATE = "module", "outputs", "update"
#: Children of a suspect that are looked at with it; a model's root has too many to be suspects.
_CHILDREN = 12


class Plan(msgspec.Struct, frozen=True):
    """``suspects.json``: what to look at again, or why there is nothing."""

    suspects: Suspects | None
    #: Keys of the runs that were diagnosed.
    benchmark: str
    target: str
    reason: str = ""
    #: What kind of thing parts (:mod:`rlprobe.judge.origin`, or an outcome of the stage).
    origin: str = ""
    #: Relative difference that values which agree may have where they enter the suspect, and the
    #: floor of the record that parts: what makes less of a difference is not its cause.
    noise: float = 0.0
    floor: float = 0.0
    #: The floor of the record that is looked at, where that is another one: a law of it is held
    #: against its own, and not against that of a loss, whose parts may cancel.
    of_record: float | None = None
    #: Whether weights had been updated within the step before what is looked at ran.
    updated: bool = False
    #: Where the benchmark was imported: the command for its site, and the one for here afterwards.
    elsewhere: str = ""
    afterwards: str = ""
    format: int = FORMAT


def find(directory: Path, budget_mib: int) -> Plan:
    """The suspects of a results directory.

    Args:
        directory: RESULTS_DIR of an alignment that was diagnosed.
        budget_mib: of tensors, for each process of each of the two runs.

    Raises:
        DumpError, StoreError: a file or run is missing or damaged.
    """
    results = Results.open(directory)
    found = diagnosis.current(directory)
    benchmark, target = require(results, BENCHMARK), require(results, TARGET)
    step = tables.read(results, found.judged)
    diverged = analysis.first_of(step)

    def nothing(reason: str) -> Plan:
        return Plan(None, benchmark.key, target.key, reason)

    if found.verdict != diagnosis.DIVERGED:
        return nothing(f"the verdict is {found.verdict}: there is nothing to look at again")
    if diverged is None or diverged.origin is None:
        return nothing("no stage parts: there is nothing to look at again")
    if diverged.stage.laid_out is not None:
        return nothing(f"{NO_COUNTERPART}: to look at them, lay both out alike")
    origin = diverged.origin
    late = _is_late(diverged)
    kind = _traced(diverged, late)
    modules = _nearest(diverged) if late else _modules(diverged) or _nearest(diverged)
    micro_steps = _micro_steps(benchmark, diverged, step.number)
    return Plan(
        Suspects(
            stage=diverged.stage.name,
            step=step.number,
            rank=diverged.rank or 0,
            modules=tuple(modules),
            micro_steps=micro_steps,
            record=_watched(diverged),
            samples=_samples(benchmark, diverged, step.number),
            budget_mib=budget_mib,
            trace=kind,
            trace_module=origin.module if kind == MODULE else None,
            blocks=_blocks(diverged) if kind == MODULE else (),
        ),
        benchmark.key,
        target.key,
        origin=origin.kind,
        noise=_noise(diverged),
        floor=_floor(diverged),
        of_record=_of_record(diverged),
        updated=bool(origin.row.get("update")),
    )


def _is_late(diverged: Finding) -> bool:
    """Whether what is to be seen comes after the passes: sums of gradients, and the update.

    A module's own gradients of parameters come late and are made in its backward pass, unless those
    of each micro-batch agree: then in what adds them up. What runs on the weights that an update
    left shows that update.
    """
    assert diverged.origin is not None
    origin = diverged.origin
    if origin.kind == kinds.OPTIMIZER:
        return True
    after = (origin.row.get("phase") or 0) >= execution.GRADIENTS
    own = origin.module if _is_of_a_module(origin) else None
    return after and (own is None or _agrees_by_micro_batch(diverged, own))


def _is_of_a_module(origin: kinds.Origin) -> bool:
    """Whether a module made what parts; what was done to its weights is the optimizer's."""
    return origin.module is not None and origin.kind not in (kinds.OPTIMIZER, kinds.SETTING)


def _blocks(diverged: Finding) -> tuple[str, ...]:
    """The blocks that a forward pass goes through, where it is there that the sides part."""
    assert diverged.origin is not None
    forward = diverged.origin.row.get("phase") == execution.FORWARD
    return blocks(diverged.stage.rows) if forward else ()


def _floor(diverged: Finding) -> float:
    assert diverged.origin is not None
    row = diverged.origin.row
    own, error = row.get("floor"), row.get("error")
    if not isinstance(own, float) or not math.isfinite(own):
        return 0.0
    # of another format, and within its floor by its size: what makes that much is looked for
    of_format = row.get("error_kind") == OTHER_FORMAT or row.get("other_format")
    return min(own, error / _OF_FORMAT) if of_format and isinstance(error, float) else own


def _of_record(diverged: Finding) -> float | None:
    """The floor of the gradient that a loss sends back, where that is what is looked at."""
    assert diverged.origin is not None
    watched = _watched(diverged)
    if watched == diverged.origin.row["name"]:
        return None
    back = _first_gradient(diverged)
    own = None if back is None else back.get("floor")
    return float(own) if isinstance(own, float) and math.isfinite(own) else None


#: A format is looked for by differences of this part of what it makes, and larger ones.
_OF_FORMAT = 8.0


def _noise(diverged: Finding) -> float:
    """The widest floor of the stage's activations; in a module that of the record that parts.

    What surrounds the model is given what all of it made, and the update all of its gradients.
    """
    assert diverged.origin is not None
    if _is_of_a_module(diverged.origin):
        return _floor(diverged)
    within = diverged.stage.rows.filter(
        pl.col("judged")
        & pl.col("phase").is_in([execution.FORWARD, execution.BACKWARD])
        & pl.col("floor").is_finite()
    )
    widest = within.get_column("floor").max()
    return float(widest) if isinstance(widest, (int, float)) else 0.0


def rows(directory: Path, suspects: Suspects) -> pl.DataFrame:
    """The judged records of the suspects' stage.

    Raises:
        DumpError, StoreError: a file or run is missing or damaged.
    """
    found = tables.read(Results.open(directory), diagnosis.current(directory).judged)
    return found.findings[suspects.stage].stage.rows


def shared(plan: Plan, config: Path, directory: Path, store: Path) -> Plan:
    """The plan with what is to be done where the benchmark's run was imported from another site.

    Its device is there, so its half of the refinement is made there: one command, which has in it
    what to look at, and a bundle that comes back.

    Args:
        plan: what is to be looked at.
        config: the alignment's file here.
        directory: RESULTS_DIR.
        store: the store here.
    """
    if plan.suspects is None:
        return plan
    wanted = msgspec.json.encode(Half(plan.benchmark, plan.suspects)).decode()
    quoted = [shlex.quote(str(path.resolve())) for path in (store, config, directory)]
    return msgspec.structs.replace(
        plan,
        elsewhere=f"rlprobe refine --config CONFIG --suspects {shlex.quote(wanted)} -o {BUNDLE}",
        afterwards=f"rlprobe store import --store {quoted[0]} {BUNDLE} && rlprobe refine --config "
        f"{quoted[1]} && rlprobe report {quoted[2]}",
    )


#: What the benchmark's half is carried in.
BUNDLE = "benchmark-half.rlprobe"
#: Suspects of a diagnosis have some kilobytes.
_MAX_HALF = 1 << 20


class Half(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What another site is to look at: the run that is its benchmark, and the suspects."""

    benchmark: str
    suspects: Suspects


def half(text: str) -> Half:
    """What ``--suspects`` was given.

    Raises:
        UsageError: it is no such text.
    """
    try:
        if len(text) > _MAX_HALF:
            raise ValueError(f"{len(text):,} characters")
        found = msgspec.json.decode(text, type=Half)
        if found.suspects.budget_mib < 1 or found.suspects.step < 0 or found.suspects.rank < 0:
            raise ValueError("a number is out of range")
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise UsageError(
            f"--suspects is not what another site's refinement asks for: {error}; copy the whole "
            "command from its page"
        ) from error
    return found


def kept_elsewhere(store: Path, plan: Plan) -> Run | None:
    """The benchmark's half of a refinement, where it was imported; None where it is not here."""
    assert plan.suspects is not None
    wanted = plan.suspects.declared()
    for run in runs(store):
        declared = run.manifest.declared
        is_half = declared.get("role") == REPEAT and declared.get("replay_of") == plan.benchmark
        if is_half and declared.get("suspects") == wanted:
            return run
    return None


def write(directory: Path, plan: Plan) -> Path:
    """Write ``RESULTS_DIR/refine/suspects.json``."""
    path = directory / "refine" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, structfile.encoded(plan))
    return path


def there(directory: Path) -> bool:
    """Whether suspects were looked for."""
    return (directory / "refine" / NAME).is_file()


def read(directory: Path) -> Plan:
    """Read it back.

    Raises:
        DumpError: it is missing, damaged or of another format.
    """
    path = directory / "refine" / NAME
    try:
        return structfile.load(path, Plan, (FORMAT,), again="refine again")
    except DocumentError as error:
        raise DumpError(f"{path} {error}; `rlprobe refine --part suspects` writes it") from error


def _nearest(diverged: Finding) -> list[str]:
    """Where no module is suspect: the one whose record parts, or the last that ran.

    Its records tell whether the refining runs repeat the diagnosed ones.
    """
    assert diverged.origin is not None
    shown = diverged.origin.row.get("module")
    known = diverged.stage.rows.get_column("module").drop_nulls()
    if shown not in known:
        shown = known[-1] if len(known) else None
    return [] if shown is None else [str(shown)]


def _traced(diverged: Finding, late: bool) -> str:
    """Whose operators are to be traced: the suspect module's, or what surrounds the model."""
    assert diverged.origin is not None
    if late:
        return UPDATE
    return MODULE if diverged.origin.module is not None else OUTPUTS


def _agrees_by_micro_batch(diverged: Finding, module: str) -> bool:
    """Whether the gradients of a module's parameters were judged in each pass, and agree."""
    passes = diverged.stage.rows.filter(pl.col("phase") == execution.BACKWARD)
    own = passes.filter(
        (pl.col("module") == module) & (pl.col("slot") == "grad") & pl.col("judged")
    )
    every = passes.get_column("micro_batch").n_unique()
    whole = own.get_column("micro_batch").n_unique() == every > 1
    return whole and not own.get_column("beyond").any()


def _watched(diverged: Finding) -> str:
    """The record to look at: where the sides part, or what the loss is made of and sends back."""
    assert diverged.origin is not None
    row = diverged.origin.row
    if diverged.origin.kind in (kinds.LOSS, OUTCOME):
        back = _first_gradient(diverged)
        return str(back["name"]) if back is not None else str(row["name"])
    return str(row["name"])


def _first_gradient(diverged: Finding) -> Row | None:
    rows = diverged.stage.rows.filter(
        pl.col("judged") & (pl.col("phase") == execution.BACKWARD) & pl.col("beyond")
    )
    return first(rows)


def _modules(diverged: Finding) -> list[str]:
    """The suspect, what encloses it, its children, and the module whose record shows it."""
    assert diverged.origin is not None
    known = set(diverged.stage.rows.get_column("module").drop_nulls().unique())
    shown = diverged.origin.row.get("module")
    if diverged.origin.kind == kinds.LOSS:
        back = _first_gradient(diverged)
        shown = None if back is None else back["module"]
    chosen = {diverged.origin.module, shown}
    if diverged.origin.module is not None:
        below = [m for m in known if m.rpartition(".")[0] == diverged.origin.module]
        chosen |= set(below if len(below) <= _CHILDREN else ())
        parent = diverged.origin.module.rpartition(".")[0]
        chosen |= {parent} if parent.count(".") > 1 else set()
    return sorted(m for m in chosen if isinstance(m, str) and m in known)


def _micro_steps(benchmark: Run, diverged: Finding, step: int) -> tuple[int, ...]:
    """The micro-batch of the record that parts, as capture counts; empty where it is of none.

    An engine that is led through responses counts samples, which have several forwards each.
    """
    assert diverged.origin is not None
    number = diverged.origin.row.get("micro_batch")
    if not isinstance(number, int):
        return ()
    if (diverged.origin.row.get("phase") or 0) >= execution.GRADIENTS:
        return ()  # of all of them together
    if diverged.stage.name != stages.FORCED:
        return (number,)
    known = forced.forwards(benchmark, step, diverged.rank or 0)
    order = list(dict.fromkeys(forward.sample for forward in known))
    return (order.index(known[number].sample),) if number < len(known) else ()


def _samples(benchmark: Run, diverged: Finding, step: int) -> tuple[str, ...]:
    """The samples that the micro-batch holds, where key data of the stage tell."""
    assert diverged.origin is not None
    forward = forced.forward_of(benchmark, step, diverged.rank or 0, diverged.origin.row)
    if diverged.stage.name == stages.FORCED:
        return () if forward is None else (forward.sample,)
    micro_steps = _micro_steps(benchmark, diverged, step)
    for difference in diverged.key_data:
        rows = keydata.load(benchmark, difference.name, step)
        found = [
            row.sample
            for row in rows
            if row.sample is not None
            and row.rank == (diverged.rank or 0)
            and (not micro_steps or row.micro_step in micro_steps)
        ]
        if found:
            return tuple(found)
    return ()
