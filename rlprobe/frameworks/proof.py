"""What a finished run must have left behind, whichever framework ran it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlprobe.capture.session import Session
from rlprobe.errors import HookError, ReplayError
from rlprobe.frameworks import progress
from rlprobe.rollouts import hdf5

_log = logging.getLogger("rlprobe")


def forget(session: Session) -> None:
    """Take away what an earlier run into the same directory left as its proof."""
    side = Path(session.side)
    shutil.rmtree(side / "parts", ignore_errors=True)
    for name in ("metrics.jsonl", progress.FILE):
        (side / name).unlink(missing_ok=True)


def require_version(session: Session, installed: str) -> None:
    """The framework is of the version that the run's key was made with.

    Args:
        session: ``framework_version`` None accepts any.
        installed: what the framework says of itself; a local suffix (``+cpu``) does not matter.

    Raises:
        HookError: another version: the numbers would be kept under a name that is not theirs.
    """
    declared = session.framework_version
    if declared is None:
        return
    if declared.removeprefix("v") not in (installed, installed.partition("+")[0]):
        raise HookError(
            f"framework_version says {session.framework} {declared}, but {installed} is installed "
            "here: correct framework_version, or use the environment or image of that version"
        )


def require_captured(session: Session) -> None:
    """Every expected stage left records in every captured step.

    Raises:
        HookError: names each stage and the steps where it is missing.
    """
    seen = {
        (record["stage"], int(record["step"]))
        for record in _parts(session, "captured")
        if record["records"] > 0
    }
    options = session.capture
    missing = []
    for stage in session.expected_stages:
        steps = [
            step
            for step in range(options.step_start, options.step_end + 1)
            if (stage, step) not in seen
        ]
        if steps:
            missing.append(f"{stage} (step {', '.join(map(str, steps))})")
    if missing:
        raise HookError(
            f"expected stages were not captured: {'; '.join(missing)}. Check that the algorithm "
            "runs them, that training reached these steps, and that nothing else took the hooks out"
        )


def require_replayed(session: Session, recorded: Path) -> None:
    """Every captured step trained on the samples recorded for it, not on generated ones.

    Some samples that differ are for the gate to judge, which says where they do; the run is kept.

    Args:
        session: the session of a replay without a replay order of its own.
        recorded: directory of the ``step{N}.h5`` files that were to be replayed.

    Raises:
        ReplayError: no sample digest was left, or none of the samples trained on was recorded.
    """
    files = hdf5.steps(recorded)
    trained: dict[int, set[str]] = {}
    for record in _parts(session, "samples"):
        trained.setdefault(int(record["step"]), set()).update(record["samples"])
    options = session.capture
    for step in range(options.step_start, options.step_end + 1):
        found = trained.get(step, set())
        wanted = {sample.sample_digest for sample in hdf5.read(files[step]).samples}
        if not found:
            raise ReplayError(f"step {step}: no process recorded the samples it trained on")
        if found.isdisjoint(wanted):
            raise ReplayError(
                f"step {step}: none of the {len(found)} samples trained on is among the "
                f"{len(wanted)} recorded: the replay did not replace generation"
            )
        if found != wanted:
            _log.warning(
                "step %d: %d of %d samples trained on are not among the %d recorded, and %d "
                "recorded ones were not trained on",
                step, len(found - wanted), len(found), len(wanted), len(wanted - found),
            )  # fmt: skip


def require_joined(session: Session) -> None:
    """Every captured step but the first kept its state, or was begun from the benchmark's.

    Raises:
        HookError: names the steps.
    """
    if session.keep_states:
        root = Path(session.side) / "states"
        done = {step for step in session.joined_steps() if any(root.glob(f"step{step}/*.json"))}
        what = "kept no state"
    elif session.join_states is not None:
        done = {int(record["step"]) for record in _parts(session, "joined")}
        what = "was not begun from the benchmark's state"
    else:
        return
    missing = [str(step) for step in session.joined_steps() if step not in done]
    if missing:
        raise HookError(
            f"controls.rejoin: step {', '.join(missing)} {what}: no trained model entered a stage "
            "in it. Check that training reached these steps"
        )


def _parts(session: Session, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted(Path(session.side, "parts", kind).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
