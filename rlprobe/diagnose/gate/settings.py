"""Sampling, layout, precision, versions, code, environment: what each side was asked for, and had.

The framework's own settings are compared in :mod:`rlprobe.diagnose.gate.configuration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from rlprobe import frameworks
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import configuration, placed, processes
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, opened, shut
from rlprobe.diagnose.gate.processes import gathered
from rlprobe.errors import ReplayError
from rlprobe.judge.roundoff import FP32, UNIT, unit
from rlprobe.judge.row import columns_where
from rlprobe.roles import (
    BENCHMARK,
    HIGH_PRECISION,
    REPEAT,
    REPEAT_TARGET,
    TARGET,
    is_perturbed,
)
from rlprobe.said import SEMICOLON, Said, joined, listed, of_side, say
from rlprobe.store.read import Run

SAMPLING, LAYOUT = "sampling", "parallel layout"
PRECISION, VERSIONS, ENVIRONMENT = "precision", "versions", "environment"
CODE, DROPOUT = "code", "dropout"

#: Switches whose every value that can be set by the determinism table rounds as the dtype says.
_NEUTRAL = ("acl_precision_mode",)


def check(evidence: Evidence) -> tuple[list[GateItem], Shut | None]:
    """Items configuration, sampling, parallel layout, precision, versions, code, environment."""
    asked, first = configuration.item(evidence)
    sampling, second = _sampling(evidence)
    items = [
        sampling,
        asked,
        _layout(evidence),
        _precision(evidence),
        _versions(evidence),
        _code(evidence),
        _environment(evidence),
        *_dropout(evidence),
    ]
    return items, first or second


def _sampling(evidence: Evidence) -> tuple[GateItem, Shut | None]:
    try:
        generated = evidence.benchmark.generated(evidence.step.number)
    except ReplayError as error:
        return shut(
            SAMPLING,
            say("the rollouts cannot be read: {error}", error=error),
            say("import them again"),
        ), None
    if generated is None:
        return caveat(
            SAMPLING,
            say(
                "the benchmark's rollouts are not in the store, so their sampling settings "
                "are unknown"
            ),
            say("keep the rollouts when exporting the benchmark run"),
        ), None
    sampling = generated.sampling
    if not sampling:
        return caveat(
            SAMPLING,
            say("the rollouts do not say how they were sampled"),
            say("collect the benchmark again with this version"),
        ), None
    text = ", ".join(f"{key} {value}" for key, value in sorted(sampling.items()))
    target = configuration.of_run(evidence.target)
    used = None if target is None else _temperature(target)
    if used is not None and "temperature" in sampling and float(sampling["temperature"]) != used:
        said = say(
            "rollouts were sampled at temperature {temperature}, the target computes "
            "log-probs at {used}",
            temperature=sampling["temperature"],
            used=used,
        )
        return shut(SAMPLING, said, say("use one temperature on both sides")), Shut(
            "sampling_semantics", SAMPLING, "", 0, None, None, {}, {}, [said]
        )
    return opened(SAMPLING, say("one set of rollouts for both sides: {text}", text=text)), None


def _temperature(settings: Mapping[str, Any]) -> float | None:
    for key in ("actor_rollout_ref.rollout.temperature", "rollout_temperature", "temperature"):
        for name, value in settings.items():
            if (name == key or name.endswith(f".{key}")) and isinstance(value, int | float):
                return float(value)
    return None


def _layout(evidence: Evidence) -> GateItem:
    shown = [_layout_of(run) for run in (evidence.benchmark, evidence.target)]
    if not all(shown):
        return caveat(
            LAYOUT, say("a side did not record its parallel layout"), say("collect it again")
        )
    elsewhere = placed.check(evidence) if shown[0] == shown[1] else []
    if elsewhere:
        return caveat(
            LAYOUT,
            say(
                "the same on both sides ({shown}), and yet {elsewhere}",
                shown=shown[0],
                elsewhere=joined(elsewhere, SEMICOLON),
            ),
            say(
                "see what shares parameters and gradients out (a distributed optimizer, a wrapper) "
                "on either side"
            ),
        )
    if shown[0] == shown[1]:
        return opened(LAYOUT, say("the same on both sides: {shown}", shown=shown[0]))
    return caveat(
        LAYOUT,
        say("benchmark {benchmark}; target {target}", benchmark=shown[0], target=shown[1]),
        say(
            "sums are split differently: expect other rounding, and records of shards "
            "without partner"
        ),
    )


def _layout_of(run: Run) -> str:
    roles: dict[str, set[str]] = {}
    for process in run.manifest.layout:
        sizes = {"world": process.world_size, "tp": process.tp, "pp": process.pp,
                 "dp": process.dp, "cp": process.cp, "ep": process.ep}  # fmt: skip
        text = " ".join(f"{k}={v}" for k, v in sizes.items() if v != 1 or k == "world")
        roles.setdefault(process.role, set()).add(text)
    return "; ".join(f"{role} {', '.join(sorted(t))}" for role, t in sorted(roles.items()))


def _precision(evidence: Evidence) -> GateItem:
    declared = [
        str(run.manifest.declared.get("precision", "?"))
        for run in (evidence.benchmark, evidence.target)
    ]
    switches = [gathered(run, "switches") for run in (evidence.benchmark, evidence.target)]
    same = processes.of_one_kind(evidence.benchmark, evidence.target)
    shared = _as_they_are if same else _shared_switches
    found = [
        text
        for texts in configuration.differences(*shared(switches[0], switches[1])).values()
        for text in texts
    ] or processes.unlike(evidence.benchmark, evidence.target, "switches", shared)
    if declared[0] != declared[1]:
        return caveat(
            PRECISION,
            say(
                "benchmark {benchmark}, target {target}; switches: {found}",
                benchmark=declared[0],
                target=declared[1],
                found=listed(found) if found else say("equal"),
            ),
            say("the coarser side's rounding is what the floor allows for"),
        )
    formats = _other_formats(evidence)
    if formats:
        return caveat(
            PRECISION,
            say("both {declared}, and yet {formats}", declared=declared[0], formats=formats),
            say("see the first divergence: what computes in another format than was asked for"),
        )
    coarse = _coarser(evidence, declared[0])
    if coarse:
        return caveat(
            PRECISION,
            say("both {declared}, and yet {formats}", declared=declared[0], formats=coarse),
            say(
                "find what makes both sides compute so (autocast, a loaded dtype): floors are of "
                "the coarser format, and what fp32 would show is within them"
            ),
        )
    unsaid = [side for side, own in zip(("benchmark", "target"), switches, strict=True) if not own]
    if len(unsaid) == 1:
        return caveat(
            PRECISION,
            say(
                "both {declared}; the {side} did not record its switches",
                declared=declared[0],
                side=of_side(unsaid[0]),
            ),
            say("run it again: what rounds factors first (TF32, HF32) is known from them alone"),
        )
    if found:
        return caveat(
            PRECISION,
            say(
                "both {declared}; switches differ: {found}",
                declared=declared[0],
                found=listed(found, 6),
            ),
            say("set the switches alike, or expect the coarser side's rounding"),
        )
    return opened(PRECISION, say("both {declared}, the same switches", declared=declared[0]))


def _other_formats(evidence: Evidence) -> Said | None:
    """How many modules' outputs are of another format on the target; None where none is."""
    said = []
    for name, finding in evidence.step.findings.items():
        both = [pl.col(f"dtype_{side}").is_in(list(UNIT)) for side in ("benchmark", "target")]
        other = (pl.col("slot") == "output") & (pl.col("direction") == "forward")
        other &= pl.all_horizontal(*both) & (pl.col("dtype_benchmark") != pl.col("dtype_target"))
        count = columns_where(finding.stage.rows, other, "slot").height
        if count:
            said.append(say("{count:,} outputs of {name}", count=count, name=name))
    return say("{what} are of another format", what=listed(said, 6)) if said else None


def _coarser(evidence: Evidence, declared: str) -> Said | None:
    """How many modules' outputs both sides have in fewer bits than fp32, which was asked for."""
    if declared != "fp32":
        return None
    said = []
    for name, finding in evidence.step.findings.items():
        short = [unit(f"dtype_{side}") > FP32 for side in ("benchmark", "target")]
        made = (pl.col("slot") == "output") & (pl.col("direction") == "forward")
        count = columns_where(finding.stage.rows, made & pl.all_horizontal(*short), "slot").height
        if count:
            said.append(say("{count:,} outputs of {name}", count=count, name=name))
    return (
        say("{what} are of a coarser format on both sides", what=listed(said, 6)) if said else None
    )


def _as_they_are(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(left), dict(right)


def _shared_switches(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Switches without those that one kind of device does not have and that are off on the other.

    Another kind of device has other switches: HF32 that is off is no difference from a GPU.
    """
    off = ("False", "disable")
    lone = {
        name
        for name in left.keys() ^ right.keys()
        if str({**left, **right}[name]) in off or name in _NEUTRAL
    }
    sides = [{name: v for name, v in side.items() if name not in lone} for side in (left, right)]
    return sides[0], sides[1]


def _versions(evidence: Evidence) -> GateItem:
    sides = [gathered(run, "versions") for run in (evidence.benchmark, evidence.target)]
    if not sides[0] or not sides[1]:
        return caveat(VERSIONS, say("a side did not record its versions"), say("collect it again"))
    found = [
        f"{key}: {sides[0].get(key, '(absent)')} -> {sides[1].get(key, '(absent)')}"
        for key in sorted(sides[0].keys() | sides[1].keys())
        if sides[0].get(key) != sides[1].get(key)
    ] or processes.unlike(evidence.benchmark, evidence.target, "versions")
    known = [*_unrecorded(evidence), *_known_differences(evidence)]
    if not found and not known:
        return opened(VERSIONS, say("{count} packages, the same versions", count=len(sides[0])))
    differ = say(
        "{count} of {total} differ: {found}",
        count=len(found),
        total=len(sides[0].keys() | sides[1].keys()),
        found=listed(found, 6),
    )
    return caveat(
        VERSIONS,
        joined([*([differ] if found else []), *known], SEMICOLON),
        say("where a model's code is in the framework, the same version makes the same operations"),
    )


def _unrecorded(evidence: Evidence) -> list[Said]:
    """Processes that did not record their versions, nor anything else of their software."""
    sides = {"benchmark": evidence.benchmark, "target": evidence.target}
    return [
        say("not recorded by {names} of the {side}", names=listed(lost, 4), side=of_side(side))
        for side, run in sides.items()
        if (lost := processes.unrecorded(run))
    ]


def _known_differences(evidence: Evidence) -> list[Said]:
    """What the two declared versions of the framework compute otherwise by themselves."""
    sides = [run.manifest.declared for run in (evidence.benchmark, evidence.target)]
    framework = sides[0].get("framework")
    declared = [str(side.get("framework_version", "")) for side in sides]
    if framework not in frameworks.NAMES or framework != sides[1].get("framework"):
        return []
    return frameworks.get(str(framework)).known_differences(*declared)


#: Which side's code a control must have run with: it is that side once more.
_SIDE_OF_CONTROL = {REPEAT: BENCHMARK, HIGH_PRECISION: BENCHMARK, REPEAT_TARGET: TARGET}


def _code(evidence: Evidence) -> GateItem:
    """The code that each process imported: a control's is that of its side, or it is no control.

    A key tells of code that the scheduling host can read. Code inside an image, an image behind a
    tag that moved, or a package that was edited between two runs shows here.
    """
    sides = {BENCHMARK: evidence.benchmark, TARGET: evidence.target}
    imported = {role: gathered(run, "code") for role, run in sides.items()}
    stale = []
    for control, run in sorted(evidence.controls.items()):
        role = BENCHMARK if is_perturbed(control) else _SIDE_OF_CONTROL.get(control)
        if role is None:
            continue
        other = _other_code(imported[role], gathered(run, "code"))
        if other:
            stale.append(
                say(
                    "{control} ({key}) ran other code of {packages} than the {role} ({other})",
                    control=control,
                    key=run.key[:12],
                    packages=listed(other, 6),
                    role=of_side(role),
                    other=sides[role].key[:12],
                )
            )
    if stale:
        return shut(
            CODE,
            joined(stale, SEMICOLON),
            say(
                "one of them was made before the code changed and is stale: `rlprobe run --force "
                "--config FILE --role ROLE`, or `rlprobe store rm KEY`"
            ),
        )
    if bool(imported[BENCHMARK]) != bool(imported[TARGET]):
        lone = TARGET if imported[BENCHMARK] else BENCHMARK
        return caveat(
            CODE,
            say("the {side} did not record its code", side=of_side(lone)),
            say("collect it again: equal versions do not say that the code is the same"),
        )
    if not imported[BENCHMARK]:
        return opened(
            CODE, say("not recorded by these runs: what versions say is all that is known")
        )
    other = _other_code(imported[BENCHMARK], imported[TARGET])
    versions = [gathered(run, "versions") for run in sides.values()]
    unsaid = [name for name in other if versions[0].get(name) == versions[1].get(name)]
    if unsaid:
        return caveat(
            CODE,
            say(
                "the same version and other code on the two sides: {packages}",
                packages=listed(unsaid, 6),
            ),
            say("a fork or an edit on one side is found as if the device had done it"),
        )
    shared = sorted(imported[BENCHMARK].keys() & imported[TARGET].keys())
    if other:
        return opened(CODE, say("as versions say"))
    return opened(CODE, say("the same code of {packages}", packages=listed(shared)))


def _other_code(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Packages that both imported, with other contents."""
    return sorted(name for name in left.keys() & right.keys() if left[name] != right[name])


def _dropout(evidence: Evidence) -> list[GateItem]:
    """No item where nothing is dropped, nor of runs that did not record it."""
    sides = {BENCHMARK: evidence.benchmark, TARGET: evidence.target}
    on = {
        side: listed([f"{name} {p}" for name, p in sorted(found.items())], 4)
        for side, run in sides.items()
        if (found := gathered(run, "dropout"))
    }
    if not on:
        return []
    lines = [
        say("{side}: {dropped}", side=of_side(side), dropped=dropped)
        for side, dropped in on.items()
    ]
    return [
        caveat(
            DROPOUT,
            say(
                "elements are dropped at random while training: {sides}",
                sides=joined(lines, SEMICOLON),
            ),
            say(
                "two devices draw other numbers, so updates differ: set it to 0 in the model's "
                "configuration on both sides"
            ),
        )
    ]


def _environment(evidence: Evidence) -> GateItem:
    """Device and variables: these are what is compared, so they are never a caveat."""
    lines = []
    for side, run in (("benchmark", evidence.benchmark), ("target", evidence.target)):
        names = sorted({str(p.get("device_name", "?")) for p in run.environment().values()})
        lines.append(
            say(
                "{side} {device} ({names})",
                side=of_side(side),
                device=run.manifest.declared.get("device", "?"),
                names=listed(names),
            )
        )
    sides = [
        {**gathered(run, "variables"), **gathered(run, "kernels"), **gathered(run, "threads")}
        for run in (evidence.benchmark, evidence.target)
    ]
    found = [
        text for texts in configuration.differences(sides[0], sides[1]).values() for text in texts
    ]
    differ = (
        say("; differ in {found}", found=listed(found, 6)) if found else say("; the same settings")
    )
    return opened(ENVIRONMENT, joined(lines, SEMICOLON) + differ)
