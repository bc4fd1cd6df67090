"""From a diagnosis to what is to be looked at again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl

from rlprobe.diagnose import diagnosis
from rlprobe.documents import structfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import DumpError
from rlprobe.files import replace_bytes
from rlprobe.judge import analysis, execution, keydata, tables
from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import OUTCOME, Finding
from rlprobe.judge.inputs import Results, require
from rlprobe.judge.row import Row, first
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

NAME = "suspects.json"
FORMAT = 1
#: Children of a suspect that are looked at with it; a model's root has too many to be suspects.
_CHILDREN = 12


class Plan(msgspec.Struct, frozen=True):
    """``suspects.json``: what to look at again, or why there is nothing."""

    suspects: Suspects | None
    #: Keys of the runs that were diagnosed.
    benchmark: str
    target: str
    reason: str = ""
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
    origin = diverged.origin
    late = (origin.row.get("phase") or 0) >= execution.GRADIENTS
    kind = _traced(diverged, late)
    modules = _nearest(diverged) if late else _modules(diverged) or _nearest(diverged)
    micro_batch = origin.row.get("micro_batch")
    micro_steps = (int(micro_batch),) if isinstance(micro_batch, int) else ()
    return Plan(
        Suspects(
            stage=diverged.stage.name,
            step=step.number,
            rank=diverged.rank or 0,
            modules=tuple(modules),
            micro_steps=micro_steps,
            record=_watched(diverged),
            samples=_samples(benchmark, diverged, step.number, micro_steps),
            budget_mib=budget_mib,
            trace=kind,
            trace_module=origin.module if kind == "module" else None,
        ),
        benchmark.key,
        target.key,
    )


def here(plan: Plan, imported: str | None) -> Plan:
    """The plan as far as it can be carried out on this site.

    Args:
        plan: what is to be looked at.
        imported: key of the benchmark's run, where that comes from another site.
    """
    if imported is None or plan.suspects is None:
        return plan
    where = plan.suspects.trace_module or f"the {plan.suspects.trace}"
    return Plan(
        None,
        plan.benchmark,
        plan.target,
        f"{plan.suspects.stage} parts at {where}, and the benchmark {imported[:12]} was collected "
        "at another site, whose device is not here: export the target's run from this store, "
        "import it there, and run `rlprobe refine` there with the same alignment",
    )


def write(directory: Path, plan: Plan) -> Path:
    """Write ``RESULTS_DIR/refine/suspects.json``."""
    path = directory / "refine" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, structfile.encoded(plan))
    return path


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
        return "update"
    return "module" if diverged.origin.module is not None else "outputs"


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


def _samples(
    benchmark: Run, diverged: Finding, step: int, micro_steps: tuple[int, ...]
) -> tuple[str, ...]:
    """The samples that those micro-batches hold, where key data of the stage tell."""
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
