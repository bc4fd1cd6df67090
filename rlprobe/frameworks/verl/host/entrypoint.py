"""Where verl's training starts, and what the Hydra configuration of that place says.

verl's own entry point has verl's defaults, which the rest of this room knows. Another one, as a
recipe's, may have a configuration file of its own: what that file sets is read here as far as it
decides which stages run. It is composed for real by Hydra, inside the image.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ConfigError

if TYPE_CHECKING:
    from rlprobe.config import EntryPointSection
    from rlprobe.spec import RunSpec

MODULE = "verl.trainer.main_ppo"
#: verl's own configurations that choose Megatron (deprecated there, and still in scripts).
_MEGATRON = "ppo_megatron_trainer"


@dataclass(frozen=True)
class _Hydra:
    """A configuration's place and name."""

    directory: Path | None
    name: str | None


def words(spec: RunSpec) -> list[str]:
    """``python``, the entry point, and Hydra's options about its configuration."""
    entry = spec.entry_point
    if entry is None:
        return ["python", "-m", MODULE]
    if entry.script is not None:
        found = ["python", str(Path(entry.script).expanduser().absolute())]
    else:
        found = ["python", "-m", entry.module or MODULE]
    if entry.config_path is not None:
        found.append(f"--config-path={Path(entry.config_path).expanduser().absolute()}")
    if entry.config_name is not None:
        found.append(f"--config-name={entry.config_name}")
    return found


def overrides(spec: RunSpec) -> list[str]:
    """What the entry point's own configuration file sets, as overrides; empty where there is none
    that this machine can read.

    Raises:
        ConfigError: the file is there and is no YAML.
    """
    return [] if spec.entry_point is None else configured(spec.entry_point, spec.environment)


def configured(entry: EntryPointSection, environment: Mapping[str, str]) -> list[str]:
    """:func:`overrides` of an entry point that is started with these variables."""
    found = _hydra(entry, environment)
    named = (found.name or "").removesuffix(".yaml")
    chosen = ["model_engine=megatron"] if named == _MEGATRON else []
    if found.directory is None or not named:
        return chosen
    file = found.directory / f"{named}.yaml"
    if not file.is_file():
        return chosen
    from rlprobe.documents import yamlfile

    try:
        raw = yamlfile.load(file)
    except DocumentError as error:
        raise ConfigError(f"entry_point: {file}: {error}") from error
    if not isinstance(raw, dict):
        return chosen
    for default in raw.get("defaults") or ():
        if isinstance(default, dict) and default.get("override model_engine") == "megatron":
            chosen = ["model_engine=megatron"]
    return [*chosen, *_flat({k: v for k, v in raw.items() if k not in ("defaults", "hydra")})]


def _flat(section: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        elif not isinstance(value, (dict, list)):
            text = {True: "true", False: "false", None: "null"}.get(value, value)
            # an interpolation is not resolved here, and decides nothing
            if not (isinstance(text, str) and "${" in text):
                yield f"{above}{key}={text}"


def _hydra(entry: EntryPointSection, environment: Mapping[str, str]) -> _Hydra:
    file = Path(entry.script).expanduser() if entry.script else source(entry.module, environment)
    declared = _declared(file) if file is not None else _Hydra(None, None)
    directory = declared.directory
    if entry.config_path is not None:
        directory = Path(entry.config_path).expanduser().absolute()
    return _Hydra(directory, entry.config_name or declared.name)


def source(module: str | None, environment: Mapping[str, str]) -> Path | None:
    """A module's file, looked for without importing anything: as ``python -m`` would with these
    variables."""
    if module is None:
        return None
    parts = module.split(".")
    named = [place for place in environment.get("PYTHONPATH", "").split(":") if place]
    for place in [str(Path.cwd()), *named, *sys.path]:
        file = Path(place, *parts[:-1], f"{parts[-1]}.py")
        if file.is_file():
            return file
    return None


def _declared(source: Path) -> _Hydra:
    """What ``@hydra.main(config_path=…, config_name=…)`` in a file says."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"entry_point: {source} cannot be read as Python: {error}") from error
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "main":
            continue
        given = {
            word.arg: word.value.value
            for word in node.keywords
            if isinstance(word.value, ast.Constant)
        }
        if "config_name" in given or "config_path" in given:
            relative = given.get("config_path")
            directory = None
            if isinstance(relative, str) and "://" not in relative:
                directory = (source.parent / relative).absolute()
            name = given.get("config_name")
            return _Hydra(directory, name if isinstance(name, str) else None)
    return _Hydra(None, None)
