"""What ``RLPROBE_CONFIG`` names: a session, the vendor's collector YAML, msprobe's config.json, or
the directory of a recording without a configuration.

Standard library only except for YAML, because it is read at interpreter start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlprobe.capture.session import ENV, Session
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError, decoded, read_bytes
from rlprobe.errors import ConfigError
from rlprobe.frameworks import plain

_LIMIT = 4 << 20


@dataclass(frozen=True)
class Switch:
    """What was found at the path, and the frameworks whose hooks it needs."""

    path: Path
    #: session, collector (``precision_collector.yaml``), msprobe (``config.json``, for slime) or
    #: plain (:mod:`.plain`, for whichever framework is started).
    kind: str
    frameworks: tuple[str, ...]
    session: Session | None = None
    #: Where a plain recording goes.
    directory: str | None = None


def read(path: str | Path, named_by: str = ENV) -> Switch:
    """Tell what the file at ``path`` is; ``named_by`` is what led to it, for messages.

    Raises:
        ConfigError: the file is missing, too large, or none of these.
    """
    path = Path(path).expanduser()
    try:
        text = decoded(read_bytes(path, _LIMIT))
    except DocumentError as error:
        raise ConfigError(f"{named_by} names {path}: {error}") from error
    if text.lstrip().startswith("{"):
        return _json(path, text, named_by)
    from rlprobe.documents import yamlfile

    try:
        raw = yamlfile.parse(text)
    except DocumentError as error:
        raise ConfigError(f"{named_by} names {path}: {error}") from error
    if isinstance(raw, dict) and "precision_collector" in raw:
        return Switch(path, "collector", ("verl",))
    raise _unknown(path, named_by)


def _json(path: Path, text: str, named_by: str) -> Switch:
    try:
        raw = jsonfile.parse(text)
    except DocumentError as error:
        raise ConfigError(f"{named_by} names {path}: {error}") from error
    if "role" in raw and "dump" in raw:
        session = Session.from_json(text, str(path))
        return Switch(path, "session", (session.framework,), session)
    if "precision_collector" in raw:
        return Switch(path, "collector", ("verl",))
    if "dump_path" in raw:
        return Switch(path, "msprobe", ("slime",))
    directory = raw.get(plain.KEY)
    if isinstance(directory, str) and set(raw) == {plain.KEY} and Path(directory).is_absolute():
        return Switch(path, "plain", ("verl", "slime"), directory=directory)
    raise _unknown(path, named_by)


def _unknown(path: Path, named_by: str) -> ConfigError:
    return ConfigError(
        f"{named_by} names {path}, which is neither a session that rlprobe wrote, nor a YAML file "
        "with the key precision_collector, nor msprobe's config.json (with dump_path)"
    )
