"""A recording without a configuration of its own: what ``rlprobe exec -- CMD`` asks for.

Every stage of the first step, by the light engine, into one directory that is named by a small JSON
file. Which framework the command starts, and which stages that runs, is known only once its trainer
is there: the session is made then.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from rlprobe import stages
from rlprobe.capture.session import CaptureOptions, Session
from rlprobe.files import replace_text

#: The key that such a file is told by; its value is the dump's directory.
KEY = "records_to"
#: The file's name, in that directory.
FILE = "exec.json"
#: The role of such a session: neither an alignment's run nor the vendor's collector.
ROLE = "exec"


def write(directory: Path) -> Path:
    """Make the directory and the file that names it; returns the file."""
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE
    replace_text(path, json.dumps({KEY: str(directory)}, indent=1) + "\n")
    return path


def discard(directory: Path) -> None:
    """Take away what :func:`write` made where nothing came of it: the next attempt goes there."""
    left = list(directory.iterdir())
    if [path.name for path in left] == [FILE]:
        left[0].unlink()
        directory.rmdir()


def session(
    directory: str,
    framework: str,
    available: Collection[str],
    *,
    device: str = "cpu",
    expected: Collection[str] = (),
    rollouts: bool = True,
) -> Session:
    """The session of such a recording.

    Args:
        directory: where everything goes; the contract's tree begins there.
        framework: whose hooks are asked.
        available: canonical stages that this training runs, or may run; inference layers are left
            out, since they would slow the generation that is only watched here.
        device: kind of device trained on.
        expected: stages without which the training has failed to be recorded.
        rollouts: whether the first step's rollouts are written.
    """
    chosen = tuple(stage for stage in stages.TRAINING_STAGES if stage in available)
    return Session(
        role=ROLE,
        framework=framework,
        dump=directory,
        side=directory,
        # weights at the start are digested, as in an alignment: two recordings that began from
        # other weights are told apart by it
        capture=CaptureOptions(engine="light", stages=chosen, sketch=True, key_data=True),
        collect_rollouts=rollouts,
        device=device,
        expected_stages=tuple(stage for stage in chosen if stage in expected),
    )


def recorded(directory: Path) -> dict[str, int]:
    """Stages that a recording left, with how many processes' dumps of each there are."""
    found: dict[str, int] = {}
    for path in sorted(directory.glob("*/step*/rank*/dump.json")):
        stage = path.parts[-4]
        found[stage] = found.get(stage, 0) + 1
    return found
