"""One run from start to commit, on the host of the allocation, without torch or a framework."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe import frameworks, redaction, stages
from rlprobe.capture import determinism
from rlprobe.capture.session import ENV, CaptureOptions, ReplayOptions, Session
from rlprobe.dumps import places
from rlprobe.errors import IncompleteRunError, RlprobeError, RunError, StoreError
from rlprobe.files import replace_text
from rlprobe.frameworks import forward, proof
from rlprobe.roles import BENCHMARK, REPEAT
from rlprobe.runs import (
    containers,
    devices,
    entry,
    patience,
    process,
    routing,
    script,
    starting,
    states,
)
from rlprobe.runs.follow import Progress
from rlprobe.runs.plan import FAULT_ENV
from rlprobe.spec import RunSpec
from rlprobe.store import attempts
from rlprobe.store.commit import commit
from rlprobe.store.read import STATES, Run
from rlprobe.terminal import duration

_log = logging.getLogger("rlprobe")
_TAIL_LINES = 25


@dataclass(frozen=True)
class Started:
    """A run that is prepared: what is to be started, and where."""

    spec: RunSpec
    store: Path
    scratch: Path
    log: Path
    #: Of every process of the run.
    environment: Mapping[str, str]
    #: One after the other; the last is the training itself.
    commands: list[list[str]]
    #: Called while the run goes on.
    progress: Progress


#: Runs the commands to their end: the exit status, and the environment that they had.
Start = Callable[[Started], tuple[int, Mapping[str, str]]]


def launch(
    spec: RunSpec,
    store: Path,
    log: Path | None = None,
    start: Start | None = None,
    *,
    force: bool = False,
) -> Path:
    """Run ``spec`` and commit it, unless the store holds it already.

    Args:
        spec: the run as declared.
        store: the store's directory, on storage that every node of the run sees.
        log: the framework's output; by default ``{store}/logs/{role}-{key}.log``.
        start: how the run is started; by default in the container and on the nodes it declares.
        force: run it all the same, and put the new run in the place of the one that is there.

    Returns:
        The run's manifest.

    Raises:
        RunError: the framework failed, or left out what was expected of it.
        StoreError: a run it depends on is not in the store, or an imported one is missing.
    """
    store = store.absolute()
    manifest = _manifest(store, spec)
    _require_imported(spec, store, force=force)
    with _alone(store, spec.key):
        if manifest.exists() and not force:
            _log.info("%s: already in the store as %s", spec.role, spec.key[:12])
            _tell_if_stale(spec, store)
            return manifest
        log = (log or store / "logs" / f"{spec.role}-{spec.key[:12]}.log").absolute()
        log.parent.mkdir(parents=True, exist_ok=True)
        scratch = (None if force else _finished(store, spec)) or _fresh(store, spec)
        if not attempts.record(scratch).exists():
            with _saying_what_stays(scratch):
                _execute(spec, store, scratch, log, start or _start)
        else:
            _log.info("%s: committing what an interrupted run had finished", spec.role)
        _commit(scratch, store, spec, log)
        shutil.rmtree(scratch, ignore_errors=True)
    _log.info("%s: committed as %s", spec.role, spec.key[:12])
    return manifest


def _commit(scratch: Path, store: Path, spec: RunSpec, log: Path) -> None:
    """Commit an attempt that ran to its end, or say what the next one does with it."""
    try:
        commit(scratch, store, spec.key, spec.declared())
    except IncompleteRunError as error:
        # to commit it again would fail again: the next attempt is a run of its own
        attempts.record(scratch).unlink()
        raise type(error)(
            f"{error}\n(log: {log}; what there is stays in {scratch} until the next attempt, which "
            "runs again)"
        ) from error
    except RlprobeError as error:
        # hours of a device may lie there
        raise type(error)(
            f"{error}\n(the run's output is kept in {scratch}; the next attempt commits it without "
            f"running again. To run again instead: `rlprobe run --force --role {spec.role} "
            f"--store {shlex.quote(str(store))} --config CONFIG` with the alignment's file)"
        ) from error


@contextlib.contextmanager
def _saying_what_stays(scratch: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _log.info("what it left stays in %s until the next attempt, or `rlprobe store gc`", scratch)
        raise


def require(spec: RunSpec, store: Path, *, force: bool = False) -> None:
    """Refuse what can only fail, before anything is written to the store.

    Raises:
        RunError: this host lacks the run's devices.
        StoreError: a run it depends on is not in the store, or an imported one is missing.
    """
    store = store.absolute()
    _require_imported(spec, store, force=force)
    # what is there, or ran to its end and is only to be committed, needs nothing more
    if (_manifest(store, spec).exists() and not force) or (not force and _finished(store, spec)):
        return
    _require_given(spec, store)
    if spec.resources.nodes == 1:
        devices.require(spec.device, spec.world_size)


def _manifest(store: Path, spec: RunSpec) -> Path:
    return store / "runs" / spec.key / "manifest.json"


def _require_imported(spec: RunSpec, store: Path, *, force: bool) -> None:
    if spec.imported is not None and force:
        raise StoreError(
            f"{spec.role}: run {spec.key} was made elsewhere and cannot be made again here; import "
            "it with `rlprobe store import --replace FILE`"
        )
    if spec.imported is not None and not _manifest(store, spec).exists():
        raise StoreError(
            f"{spec.role}: run {spec.key} is to be taken from {store}, but it is not there; import "
            "it with `rlprobe store import FILE`"
        )


def _require_given(spec: RunSpec, store: Path) -> None:
    """What a replay replays is there."""
    replayed = None if spec.replay_of is None else store / "runs" / spec.replay_of / "rollouts"
    if replayed is not None and spec.rollouts is None and not replayed.is_dir():
        raise StoreError(
            f"{spec.role} replays run {spec.replay_of}, which is not in {store}; run the "
            "benchmark first (`rlprobe run --role benchmark`) or import it"
        )


def _tell_if_stale(spec: RunSpec, store: Path) -> None:
    """Name a run that is taken from the store though its tag stands for another image by now."""
    if spec.imported is not None:
        return
    facts = Run.open(store, spec.key).manifest.volatile.get("run") or {}
    then, now = facts.get("image"), containers.image_id(spec.container)
    if isinstance(then, str) and now is not None and then != now:
        _log.warning(
            "%s: run %s was made with %s as %s, which is %s now: it is stale unless the images "
            "compute the same. `rlprobe run --force` makes it again; an image named by its "
            "@sha256 digest makes a run of its own",
            spec.role, spec.key[:12], spec.container.image, then[:19], now[:19],
        )  # fmt: skip


def _alone(store: Path, key: str) -> contextlib.AbstractContextManager[None]:
    """Two alignments may share a run: the second waits for the first and then finds it done."""

    def waiting() -> None:
        _log.info("waiting: another process is making run %s", key[:12])

    return attempts.alone(store, key, waiting=waiting)


def _finished(store: Path, spec: RunSpec) -> Path | None:
    """An earlier attempt that ran to its end and was not committed."""
    return next(
        (path for path in attempts.of(store, spec.key) if attempts.record(path).exists()), None
    )


def _fresh(store: Path, spec: RunSpec) -> Path:
    """A directory for this attempt; what a killed or failed one left goes first."""
    for left in attempts.of(store, spec.key):
        _log.info("%s: what an earlier attempt left goes first: %s", spec.role, left)
        process.end_marked(left.name)
        shutil.rmtree(left)
    job = os.environ.get("SLURM_JOB_ID") or os.getpid()
    path = attempts.named(store, spec.key, job)
    (path / "dump").mkdir(parents=True)
    (path / "side").mkdir()
    return path


def session_of(spec: RunSpec, store: Path, scratch: Path) -> Session:
    """What every process of the run is told."""
    replay = None
    kept = None
    if spec.replay_of is not None:
        if spec.rejoin:
            kept = str(store / "runs" / spec.replay_of / STATES)
        replay = ReplayOptions(path=str(store / "runs" / spec.replay_of / "rollouts"))
    if spec.rollouts is not None:
        replay = ReplayOptions(path=str(Path(spec.rollouts).expanduser().absolute()))
    return Session(
        role=spec.role,
        framework=spec.framework,
        framework_version=spec.framework_version,
        dump=str(scratch / "dump"),
        side=str(scratch / "side"),
        capture=_captured(spec, store),
        replay=replay,
        collect_rollouts=spec.role == BENCHMARK,
        keep_states=spec.rejoin and spec.replay_of is None,
        join_states=kept,
        routing=str(scratch / routing.ROUTING) if spec.replays_routing else None,
        recompute_rewards=spec.recompute_rewards,
        deterministic=spec.deterministic,
        seed=spec.seed,
        device=spec.device,
        fault=_absolute_fault(spec.fault),
        fault_strength=spec.fault_strength,
        perturbed=spec.perturbed,
        precision=spec.precision,
        fault_step=spec.fault_step,
        expected_stages=spec.stages,
    )


def _captured(spec: RunSpec, store: Path) -> CaptureOptions:
    capture = spec.capture
    if spec.perturbed:
        # the trainer's metrics, and the proof that it trained on the same samples
        return CaptureOptions(
            step_start=spec.steps.start,
            step_end=spec.steps.end,
            key_data=False,
            configurations=False,
        )
    generates = stages.GENERATE in spec.stages
    return CaptureOptions(
        engine=capture.engine,
        stages=spec.stages,
        ranks=capture.ranks,
        step_start=spec.steps.start,
        step_end=spec.steps.end,
        level=capture.level,
        task=capture.task,
        summary_mode=capture.summary_mode,
        sketch=capture.sketch,
        token_sketch=capture.token_sketch,
        coordinate_sketch=bool(capture.coordinate_sketch),
        key_data=capture.key_data,
        configurations=capture.configurations,
        memory=capture.memory,
        token_range=capture.token_range if generates else None,
        forced_tokens=capture.forced_tokens if spec.forces else 0,
        forced_samples=capture.forced_samples if spec.forces else None,
        budget_mib=capture.budget_mib,
        **_kept(spec, store),
    )


def _kept(spec: RunSpec, store: Path) -> dict[str, Any]:
    """Capture options of a refining run."""
    suspects = spec.suspects
    if suspects is None:
        return {}
    if suspects.substitute is not None:
        dump = store.absolute() / "runs" / suspects.substitute / "dump"
        there = places.of_process(dump, suspects.stage, suspects.step, suspects.rank) / "outputs"
        return {
            "trace_module": suspects.trace_module,
            "substitute": str(there),
            "blocks": suspects.blocks,
            "micro_steps": suspects.micro_steps,
        }
    return {
        "keep_outputs": suspects.trace == "module" and spec.role == REPEAT,
        "modules": suspects.modules,
        "tensors": True,
        "micro_steps": suspects.micro_steps,
        "tensor_budget": suspects.budget_mib << 20,
        "trace": suspects.trace,
        "trace_module": suspects.trace_module,
        "blocks": suspects.blocks,
    }


def _absolute_fault(fault: str | None) -> str | None:
    if fault is None:
        return None
    file, _, name = fault.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{name}"


def _execute(spec: RunSpec, store: Path, scratch: Path, log: Path, start: Start) -> None:
    framework = frameworks.get(spec.framework)
    directories = frameworks.RunDirectories(scratch=scratch, assets=store / "assets")
    session = session_of(spec, store, scratch)
    _require_given(spec, store)
    states.require(spec, store)
    if spec.replays_routing and spec.replay_of is not None:
        routing.lay_out(store, spec.replay_of, scratch / routing.ROUTING)
    replace_text(scratch / "session.json", session.to_json())
    environment = {
        **(determinism.environment(spec.device) if spec.deterministic else {}),
        **framework.environment(spec, directories),
        **own_ray(spec),
        **spec.environment,
        ENV: str(scratch / "session.json"),
        # the plan has given it to the target; the benchmark must not inherit it from the caller
        FAULT_ENV: "",
    }
    # processes of a cluster that was there before inherit none of them
    environment[forward.NAMES] = ",".join(sorted(environment))
    commands = [*framework.prepare(spec, directories), framework.command(spec, directories)]
    expected = starting.expected(store, spec)
    soon = "" if expected is None else f", starts in about {duration(expected, exact=False)}"
    _log.info("%s: %s on %s%s, log %s", spec.role, spec.framework, spec.device, soon, log)
    progress = Progress(spec.role, scratch / "side", spec.steps.total, log)
    started = time.time()
    run = Started(spec, store, scratch, log, environment, commands, progress)
    status, exported = _patiently(run, start)
    if status != 0:
        raise RunError(_failure(spec, status, log, progress))
    progress.end()
    if progress.started_after is not None:
        starting.remember(store, spec, progress.started_after)
    proof.require_captured(session)
    proof.require_joined(session)
    if session.replay is not None:
        # saved rollouts are recorded as they were replayed
        saved = Path(session.side) / "rollouts"
        proof.require_replayed(session, saved if spec.rollouts else Path(session.replay.path))
    record = {
        "role": spec.role,
        "started": started,
        "ended": time.time(),
        "command": redaction.command(commands[-1], redaction.known(os.environ)),
        "environment": redaction.value(dict(exported)),
        "image": containers.image_id(spec.container),
    }
    replace_text(attempts.record(scratch), json.dumps(record, indent=1), durable=True)


def _patiently(run: Started, start: Start) -> tuple[int, Mapping[str, str]]:
    """Start a run, and again where it did not come up for a reason that passes."""
    for attempt in range(len(patience.WAITS) + 1):
        begun = run.log.stat().st_size if run.log.exists() else 0
        given = {**patience.longer(attempt), **run.environment} if attempt else run.environment
        status, exported = start(dataclasses.replace(run, environment=given))
        if status == 0 or run.progress.began or attempt == len(patience.WAITS):
            break
        with run.log.open("rb") as file:
            file.seek(begun)
            why = patience.reason(file.read().decode("utf-8", "replace"), attempt)
        if why is None:
            break
        _log.warning(
            "%s: %s (%s). Again in %.0f s, with longer limits (attempt %d of %d)",
            run.spec.role, why.what, why.said, why.wait, attempt + 2, len(patience.WAITS) + 1,
        )  # fmt: skip
        time.sleep(why.wait)
    return status, exported


def own_ray(spec: RunSpec) -> dict[str, str]:
    """Variables that keep the Ray of a run on one node to itself: loopback, nothing reported.

    Ray takes ``127.0.0.1`` for "this node" and listens on every interface, unless it is told that
    there is no cluster, as it assumes by itself on other systems (``ray_constants.py``, Ray 2.60).
    """
    if spec.resources.nodes > 1:
        return {}
    return {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def _start(run: Started) -> tuple[int, Mapping[str, str]]:
    """Enter the container or the Ray cluster, run the commands in a script there, and watch."""
    path = run.scratch / "run.sh"
    with entry.enter(run.spec, run.scratch, run.store, run.environment) as entered:
        replace_text(
            path,
            script.render(
                str(path), entered.exported, run.commands, inside_image=entered.contained
            ),
        )

        def watch() -> None:
            run.progress()
            entered.check()

        status = process.run(
            entered.argv(["bash", str(path)], run.scratch.name),
            run_id=run.scratch.name,
            log=run.log,
            watch=watch,
        )
        if status:
            entered.blame()
    return status, entered.exported


_OWN_ERROR = re.compile(r"rlprobe\.errors\.\w+: (.+)|^rlprobe: error: (.+)")


def _failure(spec: RunSpec, status: int, log: Path, progress: Progress) -> str:
    """What went wrong: rlprobe's own message where there is one, else the end of the log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        own = _OWN_ERROR.search(line)
        if own:
            return f"{spec.role}: {own.group(1) or own.group(2)}\n(log: {log})"
    tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    how = f"exit status {status}" if status > 0 else f"signal {-status}"
    return (
        f"{spec.role}: {spec.framework} ended with {how} {progress.last}; the log is {log} and "
        f"ends with\n{tail}"
    )
