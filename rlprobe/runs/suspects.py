"""The runs that keep tensors of the suspects.

Refining answers one question, so it runs only what that needs: the benchmark's rollouts once more
on each device, up to the step in question, with one stage captured, of the suspect modules only,
and tensors of the suspect micro-batches only, within a disk budget.
"""

from __future__ import annotations

import dataclasses

from rlprobe.config import Alignment
from rlprobe.errors import ConfigError
from rlprobe.roles import BENCHMARK, REPEAT, TARGET
from rlprobe.runs.plan import plan
from rlprobe.spec import RunSpec, Suspects

#: Comparison of the refining runs: the benchmark's replay against the target's.
SIDES: tuple[str, str] = (REPEAT, TARGET)


def refining(alignment: Alignment, suspects: Suspects) -> dict[str, RunSpec]:
    """The two runs: the benchmark device's replay and the target's.

    Where the benchmark was imported its device is elsewhere, and the target's alone is here.
    """
    away = alignment.benchmark.run is not None
    # a replay on the benchmark's device, whether or not the alignment asked for one
    controls = alignment.controls.model_copy(update={} if away else {"repeat": True})
    runs = plan(alignment.model_copy(update={"controls": controls}))
    origin = runs[BENCHMARK].key
    sides = SIDES[1:] if away else SIDES
    return {role: _narrowed(runs[role], suspects, origin) for role in sides}


def half(alignment: Alignment, suspects: Suspects, benchmark: str) -> RunSpec:
    """The benchmark's half of a refinement at another site.

    Raises:
        ConfigError: the alignment's benchmark is not the run in question, or is from elsewhere too.
    """
    if alignment.benchmark.run is not None:
        raise ConfigError(
            f"benchmark.run is {alignment.benchmark.run[:12]}, imported here too: its half is made "
            "where it was collected"
        )
    key = plan(alignment)[BENCHMARK].key
    if key != benchmark:
        raise ConfigError(
            f"this alignment's benchmark is run {key[:12]}, and the refinement is of "
            f"{benchmark[:12]}: give the file that it was collected with"
        )
    return refining(alignment, suspects)[REPEAT]


def substituted(alignment: Alignment, suspects: Suspects, kept: str) -> RunSpec | None:
    """The target's replay with the benchmark's outputs of the suspect module in place of its own.

    Args:
        alignment: what was diagnosed.
        suspects: what was looked at.
        kept: key of the benchmark's refining run.

    Returns:
        None where that cannot be: no module is suspect, or several processes share the step, of
        which one alone was looked at.
    """
    if suspects.trace != "module" or suspects.trace_module is None:
        return None
    alone = dataclasses.replace(suspects, micro_steps=(), blocks=())
    return _grafted(alignment, alone, kept)


def forced(alignment: Alignment, suspects: Suspects, kept: str) -> RunSpec | None:
    """The target's replay in which every block begins from the benchmark's numbers.

    Args:
        alignment, suspects, kept: as of :func:`substituted`.

    Returns:
        None where the benchmark's outputs of blocks were not kept, or several processes share the
        step.
    """
    if not suspects.blocks:
        return None
    return _grafted(alignment, dataclasses.replace(suspects, trace_module=None), kept)


def _grafted(alignment: Alignment, suspects: Suspects, kept: str) -> RunSpec | None:
    runs = plan(alignment)
    if runs[TARGET].world_size > 1:
        return None
    alone = dataclasses.replace(suspects, modules=(), trace=None, budget_mib=0, substitute=kept)
    return _narrowed(runs[TARGET], alone, runs[BENCHMARK].key)


def _narrowed(spec: RunSpec, suspects: Suspects, origin: str) -> RunSpec:
    capture = spec.capture.model_copy(
        update={
            "engine": "light",
            "task": "statistics",
            "level": "L0",
            "summary_mode": "statistics",
            "stages": (suspects.stage,),
            "ranks": (suspects.rank,),
            "token_sketch": False,
            "memory": False,
            "token_range": None,
        }
    )
    last = suspects.step
    steps = spec.steps.model_copy(update={"total": last + 1, "start": last, "end": last})
    return dataclasses.replace(
        spec, capture=capture, steps=steps, replay_of=origin, suspects=suspects
    )
