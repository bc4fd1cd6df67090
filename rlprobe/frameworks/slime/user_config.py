"""msprobe's own ``config.json`` as a session: the way slime's users switch a dump on.

``RLPROBE_CONFIG`` names the file and ``DUMP_ON=1`` stands beside it, both sent through Ray's
runtime environment. The dump goes where the file says, one directory per stage, and holds what
msprobe writes under that file: every key of it keeps msprobe's meaning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe import stages
from rlprobe.capture.msprobe import options
from rlprobe.capture.session import CaptureOptions, Session
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ConfigError

#: Switches the dump on; 0 or unset leaves training as it is.
DUMP_ON = "DUMP_ON"
#: Stages to dump, by any of their names, separated by commas; unset: all that run.
STAGES = "RLPROBE_STAGES"

#: msprobe refuses other characters, with a message about something else.
_SAFE_PATH = re.compile(r"[a-zA-Z0-9_.:/-]+")
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
#: Steps or ranks that a list of ranges may amount to.
_MOST = 10**6
_LAST = 2**31 - 1
_TASKS = ("statistics", "tensor")
_LEVELS = ("L0", "L1", "mix")
_SUMMARIES = ("statistics", "md5", "xor")


def dump_on(environ: Mapping[str, str]) -> bool:
    """Whether ``DUMP_ON`` switches the dump on.

    Raises:
        ConfigError: it is set to something that is no number.
    """
    value = environ.get(DUMP_ON, "").strip() or "0"
    try:
        return int(value) != 0
    except ValueError as error:
        raise ConfigError(f"{DUMP_ON}: found {value!r}; accepted: 1 (dump) or 0") from error


def session(path: Path, environ: Mapping[str, str] = os.environ) -> Session:
    """The session that an msprobe configuration file stands for.

    Raises:
        ConfigError: the file cannot be read, or a key has a value that cannot be captured.
    """
    try:
        raw = jsonfile.mapping(jsonfile.load(path))
    except DocumentError as error:
        raise ConfigError(f"{path}: {error}") from error
    dump = _dump_path(raw, path)
    task = _one_of(raw, "task", _TASKS, "statistics", path)
    steps = numbers(raw, "step", path)
    section = raw.get(task) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {task}: found {section!r:.80}; accepted: a mapping in braces")
    return Session(
        role="collector",
        framework="slime",
        dump=str(dump),
        side=str(dump / "rlprobe"),
        capture=CaptureOptions(
            engine="msprobe",
            stages=_stages(environ),
            ranks=numbers(raw, "rank", path),
            step_start=min(steps, default=0),
            step_end=max(steps, default=_LAST),
            level=_one_of(raw, "level", _LEVELS, "L1", path),
            task=task,
            summary_mode=_one_of(section, "summary_mode", _SUMMARIES, "statistics", path),
            sketch=False,
            key_data=False,
            configurations=False,
            provenance=False,
        ),
        collect_rollouts=False,
        # the vendor's procedure passes slime's list of chunks, so that names begin with its number
        settings={"msprobe": raw, "steps": list(steps), "model_list": True},
    )


def numbers(raw: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    """A list of steps or ranks as msprobe writes it: numbers, and ranges such as ``"0-3"``.

    Raises:
        ConfigError: something else stands in the list.
    """
    found: set[int] = set()
    value = raw.get(key)
    if value is None:
        return ()
    for item in value if isinstance(value, list) else [value]:
        bounds = _RANGE.fullmatch(item) if isinstance(item, str) else None
        if bounds is not None and int(bounds[1]) <= int(bounds[2]) <= int(bounds[1]) + _MOST:
            found.update(range(int(bounds[1]), int(bounds[2]) + 1))
        elif isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            found.add(item)
        else:
            raise ConfigError(
                f"{path}: {key}: found {item!r:.80}; accepted: a list of numbers from 0 and of "
                'ranges such as "0-3"'
            )
        if len(found) > _MOST:
            raise ConfigError(f"{path}: {key}: more than {_MOST} numbers; [] means all of them")
    return tuple(sorted(found))


def _dump_path(raw: Mapping[str, Any], path: Path) -> Path:
    value = raw.get("dump_path")
    if not isinstance(value, str) or not _SAFE_PATH.fullmatch(value):
        raise ConfigError(
            f"{path}: dump_path: found {value!r:.80}; accepted: a path of letters, digits and "
            "_ . : / - (msprobe refuses any other character)"
        )
    return Path(value).absolute()


def _one_of(
    raw: Mapping[str, Any], key: str, accepted: tuple[str, ...], default: str, path: Path
) -> str:
    value = raw.get(key) or default
    if value not in accepted:
        raise ConfigError(
            f"{path}: {key}: found {value!r:.80}{options.why(key, value)}; accepted: "
            f"{', '.join(accepted)}"
        )
    return str(value)


def _stages(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = [name.strip() for name in environ.get(STAGES, "").split(",") if name.strip()]
    chosen = {stages.canonical(name) for name in named} or set(stages.TRAINING_STAGES)
    return tuple(stage for stage in stages.STAGES if stage in chosen)
