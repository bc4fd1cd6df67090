"""The vendor's ``precision_collector.yaml``: its options, their defaults, and what they ask of us.

One key, ``precision_collector``, with the options of :data:`OPTIONS`. ``null``, ``None`` and the
text ``'None'`` all mean None. Everything wrong is refused before training, naming the key, what was
found and what is accepted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe import stages
from rlprobe.capture import memory
from rlprobe.capture.msprobe import options
from rlprobe.capture.session import CaptureOptions, ReplayOptions, Session
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ConfigError

#: msprobe refuses dump paths with any other character.
_PATH = re.compile(r"^[a-zA-Z0-9_.:/-]+$")


@dataclass(frozen=True)
class Option:
    """One option: its default, and a check that returns the value or says what is accepted."""

    default: Any
    check: Callable[[Any], Any]


class _NotAcceptedError(Exception):
    """What would have been accepted."""


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _NotAcceptedError("true or false")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _NotAcceptedError("a whole number from 0")
    return value


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _NotAcceptedError("None (by the real step), -1 (in order), or a whole number as seed")
    return value


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _NotAcceptedError("a path")
    return value


def _one_of(*accepted: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in accepted:
            raise _NotAcceptedError(", ".join(accepted))
        return str(value)

    return check


OPTIONS: dict[str, Option] = {
    "msprobe": Option(False, _flag),
    "memory_dump": Option(False, _flag),
    "dump_path": Option("./collector_save_path", _path),
    "configurations_dump": Option(False, _flag),
    "key_data_dump": Option(False, _flag),
    "reference_dump": Option(False, _flag),
    "actor_train_dump": Option(False, _flag),
    "actor_infer_dump": Option(False, _flag),
    "critic_train_dump": Option(False, _flag),
    "step_start": Option(0, _count),
    "step_end": Option(0, _count),
    "token_range_start": Option(0, _count),
    "token_range_end": Option(0, _count),
    "level": Option("L0", _one_of(*options.LEVELS)),
    "task": Option("statistics", _one_of(*options.TASKS)),
    "enable_mock_inference": Option(False, _flag),
    "mock_random_seed": Option(None, _seed),
    # the vendor spells the two defaults differently; both are kept
    "mock_data_path": Option("./collector_saved_path", _path),
    "mock_step_start": Option(0, _count),
    "mock_step_end": Option(0, _count),
}

#: Switch -> stages whose model layers it dumps.
SWITCHES: dict[str, tuple[str, ...]] = {
    "reference_dump": (stages.REFERENCE,),
    "actor_train_dump": (stages.LOG_PROB, stages.ACTOR_UPDATE),
    "actor_infer_dump": (stages.GENERATE,),
    "critic_train_dump": (stages.VALUES, stages.CRITIC_UPDATE),
}


def read(path: Path) -> dict[str, Any]:
    """The options of a file, defaults filled in.

    Raises:
        ConfigError: the file is missing, is not YAML, or an option is wrong.
    """
    from rlprobe.documents import yamlfile

    try:
        raw = yamlfile.load(path)
    except DocumentError as error:
        raise ConfigError(f"collector file {path}: {error}") from error
    if not isinstance(raw, dict) or set(raw) != {"precision_collector"}:
        found = sorted(map(str, raw)) if isinstance(raw, dict) else type(raw).__name__
        raise ConfigError(
            f"collector file {path}: found {found}; accepted: the one key precision_collector"
        )
    section = raw["precision_collector"] or {}
    if not isinstance(section, dict):
        raise ConfigError(
            f"collector file {path}: precision_collector is {section!r}; accepted: a mapping of "
            f"{', '.join(OPTIONS)}"
        )
    return _checked(section, path)


def _checked(section: dict[str, Any], path: Path) -> dict[str, Any]:
    problems = [
        f"{key}: unknown; accepted: {', '.join(OPTIONS)}" for key in section if key not in OPTIONS
    ]
    values: dict[str, Any] = {}
    for key, option in OPTIONS.items():
        value = section.get(key, option.default)
        value = None if value == "None" else value
        try:
            values[key] = option.check(value)
        except _NotAcceptedError as accepted:
            problems.append(
                f"{key}: found {value!r}{options.why(key, value)}; accepted: {accepted}"
            )
    if not problems:
        problems = _contradictions(values)
    if problems:
        raise ConfigError(f"collector file {path}: " + "; ".join(problems))
    return values


def _contradictions(values: dict[str, Any]) -> list[str]:
    problems = []
    for first, last in (
        ("step_start", "step_end"),
        ("token_range_start", "token_range_end"),
        ("mock_step_start", "mock_step_end"),
    ):
        if values[first] > values[last]:
            problems.append(
                f"{first}: found {values[first]}, after {last} {values[last]}; accepted: "
                f"{first} <= {last}"
            )
    return problems


def load(
    path: Path,
    *,
    directory: Path,
    framework: str,
    available: Sequence[str],
    device: str = "cpu",
) -> Session | None:
    """The session that a collector file asks for; None when its master switch is off.

    Args:
        path: the YAML file.
        directory: what relative paths in it mean: the driver's working directory.
        framework: whose hooks read the session.
        available: canonical stages that this training runs; a switch for a stage that it does not
            run (critic_train_dump without a critic) asks for nothing.
        device: kind of device trained on.

    Raises:
        ConfigError: the file or an option is wrong, or the rollouts to replay are not there.
    """
    values = read(path)
    if not values["msprobe"]:
        return None
    dump = directory / Path(values["dump_path"]).expanduser()
    if not _PATH.match(str(dump)):
        raise ConfigError(
            f"collector file {path}: dump_path: found {str(dump)!r}; accepted: letters, digits and "
            "_ . : / - only, which is all that msprobe takes"
        )
    wanted = {stage for switch, group in SWITCHES.items() if values[switch] for stage in group}
    replay = _replay(values, directory, path)
    chosen = tuple(
        stage
        for stage in available
        if stage in wanted and not (stage == stages.GENERATE and replay is not None)
    )
    token_range = (values["token_range_start"], values["token_range_end"])
    session = Session(
        role="collector",
        framework=framework,
        dump=str(dump),
        side=str(dump),
        capture=CaptureOptions(
            engine="msprobe",
            stages=chosen,
            step_start=values["step_start"],
            step_end=values["step_end"],
            level=values["level"],
            task=values["task"],
            sketch=False,
            key_data=values["key_data_dump"],
            configurations=values["configurations_dump"],
            memory=values["memory_dump"],
            provenance=False,
            token_range=token_range if stages.GENERATE in chosen else None,
        ),
        replay=replay,
        collect_rollouts=replay is None,
        device=device,
        expected_stages=chosen,
    )
    try:
        options.check(session.capture, device)
    except ConfigError as error:
        said = str(error).removeprefix("capture.")
        raise ConfigError(f"collector file {path}: {said}") from error
    lacking = memory.needs_layers(session)
    if lacking:
        sys.stderr.write(f"rlprobe: warning: {path}: {lacking}\n")
    return session


def _replay(values: dict[str, Any], directory: Path, origin: Path) -> ReplayOptions | None:
    if not values["enable_mock_inference"]:
        return None
    path = directory / Path(values["mock_data_path"]).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"collector file {origin}: mock_data_path: {path} is no directory; accepted: a "
            "dump_path that holds rollouts/ (or, of the vendor's tool, data/)"
        )
    return ReplayOptions(
        path=str(path),
        seed=values["mock_random_seed"],
        step_start=values["mock_step_start"],
        step_end=values["mock_step_end"],
    )
