"""Which of a script's commands trains, whatever it is wrapped in."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlprobe.documents import jsonfile, yamlfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import UsageError
from rlprobe.frameworks.adopted import Training
from rlprobe.runs.scripts import note
from rlprobe.runs.scripts.trace import WINDOWS_LINES, Command

_PYTHON = re.compile(r"python(3(\.\d+)?)?$")
_VERL = "verl.trainer.main_ppo"
#: Modules that start one process for each device; verl's trainer is a single one.
_LAUNCHERS = ("torch.distributed.", "accelerate.", "deepspeed.launcher")
#: Options of python's that take a value.
_WITH_VALUE = ("-W", "-X")


def find(commands: Sequence[Command], ended: str = "") -> Training:
    """The one command that starts verl or slime.

    Args:
        commands: as they would be run.
        ended: how the script that runs them ended, for the message where there is none.

    Raises:
        UsageError: there is none, or several; they are listed.
    """
    found = [training for command in commands for training in _of(command)]
    distinct = list({(t.entry, t.arguments): t for t in found}.values())
    words = [
        word
        for one in distinct or commands
        for word in ((*one.entry, *one.arguments) if isinstance(one, Training) else one.argv)
    ]
    _require_line_ends(words)
    if not distinct:
        seen = "; ".join(shlex.join(command.argv[:3]) for command in commands[:8])
        raise UsageError(
            "no training of verl or slime was found: neither a module verl.trainer…, nor options "
            "actor_rollout_ref.…, nor slime's train.py with --hf-checkpoint. Commands seen: "
            + (seen or "none")
            + _started_otherwise(commands)
            + ended
        )
    if len(distinct) > 1:
        raise UsageError(
            f"{len(distinct)} trainings were found, which differ in\n  "
            + "\n  ".join(_told_apart(distinct))
            + "\ngive the one you mean: rlprobe config from-command -- python …"
        )
    return distinct[0]


#: Options of a training that are listed.
_LISTED = 4


def _told_apart(trainings: Sequence[Training]) -> list[str]:
    """Each training by the options that not all of them have."""
    options = [_options(training.arguments) for training in trainings]
    common = set(options[0]).intersection(*options[1:])
    lines = []
    for number, (training, own) in enumerate(zip(trainings, options, strict=True), start=1):
        alone = [shlex.join(option) for option in own if option not in common]
        more = f" … ({len(alone) - _LISTED} more)" if len(alone) > _LISTED else ""
        shown = " ".join(alone[:_LISTED]) or "(no option of its own)"
        lines.append(f"{number}. python {shlex.join(training.entry)} {shown}{more}")
    return lines


def _options(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """Words that belong together: ``key=value``, or ``--key`` and its values."""
    found: list[tuple[str, ...]] = []
    for word in arguments:
        takes = bool(found) and found[-1][0].startswith("--") and "=" not in found[-1][0]
        if takes and not word.startswith("--"):
            found[-1] = (*found[-1], word)
        else:
            found.append((word,))
    return found


def _started_otherwise(commands: Sequence[Command]) -> str:
    """Of a command that names the trainer and starts it by another program than python."""
    for command in commands:
        if _VERL in command.argv:
            return (
                f". {shlex.join(command.argv[:3])} … is given {_VERL}, which is one process that "
                f"starts the others by itself: write python -m {_VERL}"
            )
    return ""


def _require_line_ends(words: Sequence[str]) -> None:
    """Refuse what a script of Windows line ends passes on.

    Raises:
        UsageError: a word ends with a carriage return.
    """
    for word in words:
        if word.endswith("\r"):
            raise UsageError(
                f"{word!r} ends with a carriage return: the script has {WINDOWS_LINES}"
            )


def _of(command: Command) -> Iterator[Training]:
    argv = list(command.argv)
    environment = dict(command.environment)
    cwd = Path(command.cwd)
    for index, word in enumerate(argv):
        if not _PYTHON.match(Path(word).name):
            continue
        before, rest = argv[:index], argv[index + 1 :]
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            option = rest.pop(0)
            if option in _WITH_VALUE and rest:
                rest.pop(0)
        if len(rest) < 2:
            continue
        entry = tuple(rest[:2]) if rest[0] == "-m" else (rest[0],)
        arguments = tuple(rest[len(entry) :])
        if entry[-1].startswith(_LAUNCHERS):
            continue
        framework = _framework(entry, arguments)
        if framework is None:
            continue
        environment |= note.assigned(before)
        submitted, directory = _submitted(before, cwd)
        environment |= submitted
        yield Training(framework, entry, arguments, directory, environment)
        return


def _framework(entry: tuple[str, ...], arguments: tuple[str, ...]) -> str | None:
    if entry[-1] == _VERL or any(
        word.lstrip("+~").startswith("actor_rollout_ref.") for word in arguments
    ):
        return "verl"
    if Path(entry[-1]).name.startswith("train") and any(
        word.split("=")[0] == "--hf-checkpoint" for word in arguments
    ):
        return "slime"
    return None


def _submitted(before: Sequence[str], cwd: Path) -> tuple[dict[str, str], Path]:
    """Variables and working directory of ``ray job submit``'s runtime environment.

    Raises:
        UsageError: the runtime environment cannot be read.
    """
    if "submit" not in before:
        return {}, cwd
    given: dict[str, str] = {}
    words = list(before)
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in ("--runtime-env-json", "--runtime-env", "--working-dir"):
            given[option] = value if equals else (words[index + 1 : index + 2] or [""])[0]
    raw: object = {}
    try:
        if "--runtime-env-json" in given:
            raw = jsonfile.parse(given["--runtime-env-json"])
        elif "--runtime-env" in given:
            raw = yamlfile.load(cwd / given["--runtime-env"])
    except DocumentError as error:
        where = cwd / given["--runtime-env"] if "--runtime-env" in given else "--runtime-env-json"
        raise UsageError(f"ray job submit: its runtime environment: {where}: {error}") from error
    env = raw.get("env_vars") if isinstance(raw, dict) else None
    variables = {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in (env or {}).items()}
    directory = given.get("--working-dir") or (
        raw.get("working_dir") if isinstance(raw, dict) else None
    )
    local = isinstance(directory, str) and "://" not in directory
    return variables, (cwd / str(directory)).resolve() if local else cwd
