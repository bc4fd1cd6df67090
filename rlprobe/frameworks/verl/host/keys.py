"""Overrides whose key verl does not have, found before anything is queued.

Hydra refuses them too, but minutes later, in an image, on devices that somebody waited for. What
verl has is read from the configuration that its package ships for the reader, without importing it:
of this machine's verl, and only where that is the alignment's version.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlprobe.documents import yamlfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ConfigError

#: Value of ``model_engine`` -> the file that has the whole configuration.
_FILES = {
    "dp": "_generated_ppo_trainer.yaml",
    "megatron": "_generated_ppo_megatron_trainer.yaml",
    "torchtitan": "_generated_ppo_torchtitan_trainer.yaml",
    "veomni": "_generated_ppo_veomni_trainer.yaml",
}
#: Hydra's own, and groups, whose values choose files.
_OTHERS = ("hydra.", "hydra/")
#: As close as a slip of the fingers, or a word from another place.
_NEAR = 0.75


def require(overrides: Sequence[str], version: str) -> None:
    """Refuse overrides of keys that verl does not have.

    Args:
        overrides: the user's own, ``KEY=VALUE``; with ``+`` they add a key and are left alone.
        version: of verl that the run will use.

    Raises:
        ConfigError: names every such override, and the nearest key that there is.
    """
    engine = next((o.partition("=")[2] for o in overrides if o.startswith("model_engine=")), "dp")
    known = _known(version, engine)
    if known is None:
        return
    wrong = [
        (override, key)
        for override in overrides
        if (key := _key(override)) is not None and not _there(key, known)
    ]
    if not wrong:
        return
    lines = [
        f"overrides: verl {version} has no {key}{_hint(key, known)} (+{override} would add it)"
        for override, key in wrong
    ]
    if len(lines) == 1:
        raise ConfigError(lines[0])
    raise ConfigError("\n".join([f"{len(lines)} problems", *(f"  {line}" for line in lines)]))


def _key(override: str) -> str | None:
    """The key that an override expects to be there; None where it adds, deletes or chooses."""
    key, equals, _ = override.partition("=")
    if not equals or key.startswith(("+", "~")) or "@" in key or "/" in key or "." not in key:
        return None
    return None if key.startswith(_OTHERS) else key


def _there(key: str, known: Mapping[str, bool]) -> bool:
    """Whether a key is known, or below one that may hold anything."""
    if key in known:
        return True
    parents = key.split(".")[:-1]
    above = [".".join(parents[: n + 1]) for n in range(len(parents))]
    return any(known.get(parent) for parent in above)


def _hint(key: str, known: Mapping[str, bool]) -> str:
    parent, _, leaf = key.rpartition(".")
    beside = [k for k in known if k.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(f"{parent}.{leaf}", beside, n=1, cutoff=_NEAR)
    if not near:
        # the leaf in another section, such as one that was moved
        same = [k for k in known if k.rpartition(".")[2] == leaf]
        near = difflib.get_close_matches(key, same or list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


@functools.cache
def _known(version: str, engine: str) -> Mapping[str, bool] | None:
    """Keys of this machine's verl, and whether they may hold any; None where it is another."""
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None or engine not in _FILES:
        return None
    package = Path(found.origin).parent
    try:
        own = (package / "version/version").read_text(encoding="utf-8").strip()
        if own != version:
            return None
        whole = yamlfile.load(package / "trainer/config" / _FILES[engine])
    except (OSError, UnicodeDecodeError, DocumentError):
        return None  # a verl that ships them otherwise: Hydra will say what is wrong
    return dict(_keys(whole, ""))


def _keys(value: Any, prefix: str) -> Iterator[tuple[str, bool]]:
    """Dotted keys, and whether each is empty, so that anything may stand below it."""
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        yield key, inner is None or inner == {}
        yield from _keys(inner, key)
