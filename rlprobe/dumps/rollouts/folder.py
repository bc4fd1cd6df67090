"""Which folders hold rollouts, of which framework, and which of their files is which step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlprobe.dumps.rollouts import files
from rlprobe.dumps.rollouts.files import Rollout
from rlprobe.dumps.tensors.tensorfile import Archive, TensorFileError, map_file
from rlprobe.errors import DumpError
from rlprobe.said import Said, say

#: Levels below the folder that is named: experiment, batch sizes, step, part.
_DEPTH = 4
_NUMBER = re.compile(r"(\d{1,9})$")
_EVALUATION = "eval_"
#: What verl writes last of a step's batch; versions before 0.9 write none.
_WRITTEN = "meta.json"
#: How far into a file its keys are looked for.
_HEAD = 1 << 16


@dataclass(frozen=True)
class Kind:
    """A way in which rollouts are kept."""

    #: What it is called in messages.
    name: str
    read: Callable[[Path], Rollout]


JSONL = Kind("verl's rollout_data_dir", files.jsonl)
SKIP = Kind("verl's skip.rollout", files.data_proto)
SKIP_TQ = Kind("verl's skip.rollout_tq", files.transfer_queue)
SLIME = Kind("slime's debug rollouts", files.slime)


@dataclass(frozen=True)
class Folder:
    """Rollouts of one kind."""

    kind: Kind
    #: Files of each step as the trainer numbers it, in order.
    steps: dict[int, tuple[Path, ...]] = field(default_factory=dict)
    #: What was left aside.
    notes: tuple[Said, ...] = ()

    def read(self, step: int) -> Rollout:
        """All samples of a step.

        Raises:
            DumpError: a file is damaged.
        """
        parts = [self.kind.read(path) for path in self.steps[step]]
        return Rollout(
            [sample for part in parts for sample in part.samples],
            [unread for part in parts for unread in part.unread],
        )


def find(path: Path) -> Folder | None:
    """The rollouts that a path holds or is; None where it holds none.

    Raises:
        DumpError: of two kinds, or one step twice.
    """
    met: dict[Kind, dict[int, list[Path]]] = {}
    notes: list[Said] = []
    for kind, step, file in _files(path):
        if kind is SLIME and file.stem.startswith(_EVALUATION) and file != path:
            notes.append(say("{name} is of an evaluation and was left aside", name=file.name))
            continue
        met.setdefault(kind, {}).setdefault(step, []).append(file)
    if not met:
        return None
    if path.is_dir():
        for kind in (SKIP, SKIP_TQ):
            notes += _without_unfinished(met.get(kind, {}))
    if len(met) > 1:
        raise DumpError(
            f"{path} holds rollouts of {' and of '.join(kind.name for kind in met)}; compare one "
            "kind with its like"
        )
    ((kind, steps),) = met.items()
    for step, found in steps.items():
        places = {file.parent.parent if kind is SKIP_TQ else file for file in found}
        if len(places) > 1:
            first, second = sorted(places)[:2]
            raise DumpError(
                f"{path} holds step {step} twice: {first} and {second}; name one of their folders"
            )
    ordered = {step: tuple(sorted(steps[step], key=_place)) for step in sorted(steps)}
    return Folder(kind, ordered, tuple(notes))


def _without_unfinished(steps: dict[int, list[Path]]) -> list[Said]:
    """Take out what verl was ended at while it wrote it, and would not load; notes of it."""
    written = {file: (file.parent / _WRITTEN).is_file() for own in steps.values() for file in own}
    if not any(written.values()):
        return []
    notes = []
    for step, own in list(steps.items()):
        for file in own:
            if not written[file]:
                notes.append(
                    say(
                        "{name} of step {step} has no meta.json beside it, which verl writes last: "
                        "it is unfinished, and was left aside",
                        name=file.name,
                        step=step,
                    )
                )
        steps[step] = [file for file in own if written[file]]
        if not steps[step]:
            del steps[step]
    return notes


def _place(file: Path) -> tuple[int, str]:
    number = file.parent.name
    return (int(number) if number.isdecimal() else 0, str(file))


def _files(path: Path) -> Iterator[tuple[Kind, int, Path]]:
    """Files of rollouts: kind, step, path."""
    for file in [path] if path.is_file() else _below(path, 0):
        if file.suffix == ".jsonl" and file.stem.isdecimal() and len(file.stem) < 10:
            yield JSONL, int(file.stem), file
        elif file.name == "gen_batch.dp":
            yield SKIP, _number(file.parent.name), file
        elif file.name == "tq_batch.pt":
            yield SKIP_TQ, _number(file.parent.parent.name), file
        elif file.suffix == ".pt" and _is_slime(file):
            yield SLIME, _number(file.stem), file


def _below(path: Path, depth: int) -> Iterator[Path]:
    try:
        children = sorted(path.iterdir())
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
    for child in children:
        # only those of jsonl and slime lie in the folder itself, the others in one of the step
        if child.is_file() and (depth == 0 or child.name in ("gen_batch.dp", "tq_batch.pt")):
            yield child
        elif child.is_dir() and depth < _DEPTH:
            yield from _below(child, depth + 1)


def _number(name: str) -> int:
    found = _NUMBER.search(name)
    return int(found[1]) if found else 0


def _is_slime(file: Path) -> bool:
    """Whether a file of ``torch.save`` holds samples; one that cannot be read does not say so."""
    try:
        head = bytes(Archive.open(map_file(file), 1 << 20).pickle[:_HEAD])
    except (ValueError, TensorFileError):
        return False
    return b"samples" in head
