"""Norms of gradients that a trainer clips by: of both sides, and of each side what they are of."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rlprobe import stages
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.documents import npyfile
from rlprobe.errors import DumpError
from rlprobe.judge import outcomes
from rlprobe.said import Said, listed, of_side, say
from rlprobe.store.manifest import Process
from rlprobe.store.read import Run

_MAX_BYTES = 1 << 20
#: What ranks that were given one number have of it.
_SAME = 1e-6
#: What a norm may differ by from that of its parts, which were squared and added up otherwise, or
#: of which it is kept in 16 bits.
_ADDED = 1e-2
_RANK = re.compile(r" rank(\d+)")
_GRAD_NORM = "*_grad_norm"
_TOTAL = "_total_grad_norm"
#: Before the number of one of an optimizer's several parameter groups.
_GROUP = " group"
_OF_GROUP = re.compile(
    r"(?P<role>\w+)_grad_norm rank(?P<rank>\d+) micro_step(?P<update>\d+) group\d+"
)

_Norms = Mapping[str, np.floating[Any]]


def check(evidence: Evidence) -> list[Said]:
    """What norms of gradients contradict, a sentence each."""
    return [*_of_both(evidence), *_of_parts(evidence), *_of_later_steps(evidence)]


def totals(run: Run, role: str, step: int) -> dict[int, float]:
    """The norm that a trainer reported of each update, where all of its ranks have the same.

    Args:
        run: whose.
        role: actor or critic.
        step: captured step, from 0.

    Raises:
        DumpError: a file is damaged.
    """
    norms = {k: norm for k, norm in _norms(run, step).items() if k.startswith(f"{role}{_TOTAL} ")}
    ranks = {process.rank for process in run.manifest.layout if process.role == role}
    found = _of_all(norms, ranks)
    return {int(key.rpartition("micro_step")[2]): float(norm) for key, norm in found.items()}


def _of_both(evidence: Evidence) -> list[Said]:
    """Norms that the trainer clips by, of each rank and update of the step."""
    left, right = _sides(evidence, evidence.step.number)
    if not left or not right:
        return []
    allowed = outcomes.norm_floor(found.stage.rows for found in evidence.step.findings.values())
    zero = _impossible(evidence, left, right, allowed)
    found = []
    for key in sorted(left.keys() | right.keys()):
        b, t = left.get(key), right.get(key)
        if b is None or t is None:
            found.append(say("{key} on one side only", key=key))
        elif not (np.isfinite(b) and np.isfinite(t)):
            found.append(say("{key} is {b:g} against {t:g}", key=key, b=b, t=t))
        elif b == 0 and t == 0:
            if key in zero:
                found.append(
                    say("{key} is 0 on both sides: there were no gradients, or none was read",
                        key=key)
                )  # fmt: skip
        elif abs(b - t) > allowed * max(abs(b), abs(t)):
            found.append(say("{key} is {b:.6g} against {t:.6g}", key=key, b=b, t=t))
        elif b.dtype != t.dtype and evidence.results.plan.one_precision:
            found.append(say("{key} is {b} against {t}", key=key, b=b.dtype.name, t=t.dtype.name))
    return [say("gradient norms: {found}", found=listed(found, 4))] if found else []


def _of_later_steps(evidence: Evidence) -> list[Said]:
    """What is wrong of norms however much the sides have parted before: not finite, in another
    format or on one side alone, in captured steps that are not judged."""
    if evidence.target.is_joined:  # each step is judged by itself
        return []
    captured = [set(run.manifest.steps) for run in (evidence.benchmark, evidence.target)]
    found = []
    for step in sorted(s for s in captured[0] & captured[1] if s > evidence.step.number):
        left, right = _sides(evidence, step)
        if not left or not right:
            continue
        for key in sorted(left.keys() | right.keys()):
            b, t = left.get(key), right.get(key)
            if b is None or t is None:
                found.append(say("{key} of step {step} on one side only", key=key, step=step))
            elif np.isfinite(b) != np.isfinite(t):
                found.append(
                    say("{key} of step {step} is {b:g} against {t:g}", key=key, step=step, b=b, t=t)
                )
            elif b.dtype != t.dtype and evidence.results.plan.one_precision:
                found.append(
                    say("{key} of step {step} is {b} against {t}", key=key, step=step,
                        b=b.dtype.name, t=t.dtype.name)
                )  # fmt: skip
    return [say("gradient norms: {found}", found=listed(found, 4))] if found else []


def _sides(evidence: Evidence, step: int) -> tuple[_Norms, _Norms]:
    """Norms of both sides that have a partner, by key."""
    runs = (evidence.benchmark, evidence.target)
    ranks = [{process.rank for process in run.manifest.layout} for run in runs]
    left, right = (_norms(run, step) for run in runs)
    if any(finding.stage.laid_out is not None for finding in evidence.step.findings.values()):
        # parts of a model have norms of their own; that of the whole does not depend on the layout
        left, right = (
            {key: norm for key, norm in side.items() if _TOTAL in key} for side in (left, right)
        )
    if ranks[0] != ranks[1]:  # norms of shards have no partner; those of the whole have
        left, right = (_of_all(side, own) for side, own in zip((left, right), ranks, strict=True))
    return left, right


def _impossible(evidence: Evidence, left: _Norms, right: _Norms, allowed: float) -> set[str]:
    """Norms that are 0 on both sides and cannot be.

    A group may have no gradients (frozen parameters), or none on this rank: it is 0 where another
    rank has another number, or the groups' norms come to the gradients that were recorded.
    """
    zero = {key for key in left.keys() & right.keys() if left[key] == 0 and right[key] == 0}
    elsewhere = {_RANK.sub("", key) for side in (left, right) for key in side if side[key] != 0}
    return {
        key
        for key in zero
        if (group := _OF_GROUP.fullmatch(key)) is None
        or (
            _RANK.sub("", key) not in elsewhere
            and not _is_all(evidence, left, group, allowed)
        )
    }  # fmt: skip


def _is_all(evidence: Evidence, norms: _Norms, group: re.Match[str], allowed: float) -> bool:
    """Whether the norms of all groups come to that of all gradients of a rank's update.

    A tensor-parallel rank's norms leave out what it has in common with the first, which tells for
    it.
    """
    role, rank, update = group["role"], int(group["rank"]), int(group["update"])
    of_copies = {process.rank for process in evidence.benchmark.manifest.layout if process.tp_rank}
    if rank in of_copies:
        return True
    begin = f"{role}_grad_norm rank{rank} micro_step{update} group"
    whole = math.hypot(*(float(norm) for key, norm in norms.items() if key.startswith(begin)))
    recorded = [
        _recorded(finding.stage.rows, rank, update)
        for name, finding in evidence.step.findings.items()
        if name in stages.UPDATE_STAGES and stages.MODEL_ROLE[name] == role
    ]
    return any(abs(whole - norm) <= allowed * max(whole, norm) for norm in recorded if norm)


def _recorded(rows: pl.DataFrame, rank: int, update: int) -> float:
    """Norm of all gradients of parameters that a rank recorded in an update; 0 without any."""
    own = rows.filter(
        pl.col("slot") == "grad_reduced", pl.col("rank") == rank, pl.col("call") == update
    )
    return math.hypot(*own.get_column("norm_benchmark").drop_nulls())


def _of_parts(evidence: Evidence) -> list[Said]:
    """Norms that a side clips by and that are not those of its gradients.

    Megatron's, for one, counts no other rank's part of a weight that nobody marked as divided.
    """
    found = []
    for side, run in (("benchmark", evidence.benchmark), ("target", evidence.target)):
        odd = list(_contradicted(_norms(run, evidence.step.number), run.manifest.layout))
        if odd:
            found.append(
                say(
                    "gradient norms: the {side} clips by less or more than its gradients have: "
                    "{names}",
                    side=of_side(side),
                    names=listed(odd, 4),
                )
            )
    return found


def _contradicted(norms: Mapping[str, np.floating[Any]], layout: list[Process]) -> Iterator[Said]:
    """Each reported norm that is not the root of the sum of the ranks' squares.

    Ranks have parts of the gradients, or several of them the same ones (data-parallel ones without
    a distributed optimizer, replicas of hybrid shards). Of experts on several ranks it is something
    of both, and not said.
    """
    for key, own in _by_rank(norms).items():
        name, _, update = key.partition(" ")
        places = {p.rank: p for p in layout if p.role == name.removesuffix(_TOTAL)}
        said = {float(norm) for k, norm in norms.items() if _RANK.sub("", k) == key}
        every = math.hypot(*own.values())
        odd = own.keys() != places.keys() or any(place.ep > 1 for place in places.values())
        if odd or not math.isfinite(every):
            continue
        # a layout of more parts than there are ranks is not what ran: each rank then has its own
        parts = max(1, *(place.tp * place.pp for place in places.values()))
        sharing = max(1, len(own) // parts)
        sums = [every / math.sqrt(n) for n in range(1, sharing + 1) if sharing % n == 0]
        for total in sorted(filter(math.isfinite, said)):
            near = min(sums, key=lambda one, total=total: abs(one - total))  # type: ignore[misc]
            if abs(total - near) > _ADDED * max(total, near):
                yield say(
                    "{name} {update} is {total:.6g}, that of all parts {norm:.6g}",
                    name=name, update=update, total=total, norm=near,
                )  # fmt: skip


def _by_rank(norms: Mapping[str, np.floating[Any]]) -> dict[str, dict[int, float]]:
    """By the key of the whole's norm without its rank: each rank's own norm, of all groups."""
    found: dict[str, dict[int, float]] = {}
    for key, norm in norms.items():
        rank = _RANK.search(key)
        if rank is None or _TOTAL in key:
            continue
        whole = _RANK.sub("", key.partition(_GROUP)[0]).replace("_grad_norm", _TOTAL, 1)
        own = found.setdefault(whole, {})
        own[int(rank[1])] = math.hypot(own.get(int(rank[1]), 0.0), float(norm))
    return found


def _of_all(norms: dict[str, np.floating[Any]], ranks: set[int]) -> dict[str, np.floating[Any]]:
    """Norms of which every rank has the same: those of the whole gradient, which all clip by."""
    found: dict[str, list[np.floating[Any]]] = {}
    for key, norm in norms.items():
        found.setdefault(_RANK.sub("", key), []).append(norm)
    return {
        key: own[0]
        for key, own in found.items()
        if len(own) == len(ranks) and np.ptp(own) <= _SAME * abs(own[0])
    }


def _norms(run: Run, step: int) -> dict[str, np.floating[Any]]:
    """Values by ``name, rank, update`` and, of several, parameter group; checked against the run's
    manifest."""
    root = run.key_data()
    if root is None:
        return {}
    found: dict[str, np.floating[Any]] = {}
    for path in sorted(root.glob(f"{_GRAD_NORM}/step{step}/**/*.npy")):
        try:
            value = npyfile.load(path, _MAX_BYTES)
        except (OSError, ValueError) as error:
            raise DumpError(f"{path} is not a norm: {error}") from error
        if np.issubdtype(value.dtype, np.floating):
            name, norms = _called(path, root), value.reshape(-1)
            each = [name] if len(norms) == 1 else [f"{name}{_GROUP}{n}" for n in range(len(norms))]
            found |= dict(zip(each, norms, strict=True))
    return found


def _called(path: Path, root: Path) -> str:
    name, _, *places = path.relative_to(root).parts
    return " ".join([name, *places[:-1]])
