"""Runs carried from one store to another as a single file.

A bundle is a tar archive of exactly this form, so that any ``tar`` lists it:

    rlprobe-bundle.json            format; digest and size of each run's manifest, of each object
    runs/{key}/manifest.json       in order of key
    objects/{sha256}               in order of digest

Every header holds a name, a size and nothing else that varies, so the same runs give the same bytes
everywhere. The reader wants just these bytes: a link, a device, another path, a repeated member or
an extended header has no way to be accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import Field

from rlprobe import formats
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import StoreError
from rlprobe.store.keys import canonical_json
from rlprobe.store.manifest import MAX_BYTES, Digest
from rlprobe.store.objects import Stored

FORMAT = 1
INDEX = "rlprobe-bundle.json"
BLOCK = 512
#: The two blocks that end a tar archive.
END = bytes(2 * BLOCK)
#: Largest size that eleven octal digits hold; above it GNU's base-256 form is used.
_OCTAL = 8**11

_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a directory",
    b"6": "a pipe",
    b"x": "an extended header",
    b"g": "an extended header",
    b"L": "an extended header",
    b"K": "an extended header",
}


class Member(NamedTuple):
    """One member: its name in the archive and its content."""

    name: str
    stored: Stored


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class RunEntry(_Strict):
    """A run: its key, and the digest and size of its manifest."""

    key: Digest
    sha256: Digest
    size: Annotated[int, Field(gt=0, le=MAX_BYTES)]


class ObjectEntry(_Strict):
    """An object of at least one of the runs."""

    sha256: Digest
    size: Annotated[int, Field(ge=0, lt=1 << 62)]


class Index(_Strict):
    """What a bundle holds, in the order in which it holds it."""

    format: Literal[1] = 1
    runs: Annotated[list[RunEntry], Field(min_length=1)]
    objects: list[ObjectEntry]

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Index:
        for what, names in (
            ("run", [run.key for run in self.runs]),
            ("object", [entry.sha256 for entry in self.objects]),
        ):
            for before, after in itertools.pairwise(names):
                if before == after:
                    raise ValueError(f"{what} {after} is listed twice")
                if before > after:
                    raise ValueError(f"{what} {after} is out of order")
        return self

    def members(self) -> Iterator[Member]:
        """Everything that follows the index."""
        for run in self.runs:
            yield Member(f"runs/{run.key}/manifest.json", Stored(run.sha256, run.size))
        for entry in self.objects:
            yield Member(f"objects/{entry.sha256}", Stored(entry.sha256, entry.size))

    def to_bytes(self) -> bytes:
        """The index's content."""
        return canonical_json(self.model_dump(mode="json")) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Index:
        """Parse :meth:`to_bytes`'s output.

        Raises:
            StoreError: another format version, a member of another type, a run or object listed
                twice, or bytes that :meth:`to_bytes` would not have written.
        """
        try:
            raw = jsonfile.parse(data)
        except DocumentError as error:
            raise StoreError(f"{where}: its index: {error}") from error
        found = raw.get("format") if isinstance(raw, dict) else None
        formats.check(found, (FORMAT,), f"{where}: the bundle", StoreError)
        try:
            index = cls.model_validate(raw)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, problem["loc"])) or "index"
            raise StoreError(f"{where}: {place}: {problem['msg']}") from error
        if index.to_bytes() != data:
            raise StoreError(f"{where}: its index is not written as export writes it")
        return index


def index_of(runs: Iterable[RunEntry], objects: Iterable[Stored]) -> Index:
    """The index of a bundle with these runs and objects, whatever their order.

    Raises:
        StoreError: there is no run.
    """
    entries = sorted(runs, key=lambda run: run.key)
    if not entries:
        raise StoreError("no run was chosen, so there is nothing to export")
    return Index(
        runs=entries,
        objects=[ObjectEntry(sha256=o.sha256, size=o.size) for o in sorted(set(objects))],
    )


def header(name: str, size: int) -> bytes:
    """The 512-byte header of a member (POSIX ustar; GNU's base-256 size above 8 GiB)."""
    encoded = name.encode("ascii")
    if len(encoded) > 100:
        raise ValueError(f"{name} does not fit a tar header")
    length = b"%011o\0" % size if size < _OCTAL else b"\x80" + size.to_bytes(11, "big")
    fields = [
        encoded.ljust(100, b"\0"),
        b"0000444\0",  # mode
        b"0000000\0",  # user
        b"0000000\0",  # group
        length,
        b"00000000000\0",  # time
        b" " * 8,  # checksum, counted as spaces
        b"0",  # a regular file
        bytes(100),  # link target
        b"ustar\00000",
        bytes(32),  # user name
        bytes(32),  # group name
        b"0000000\0",  # device numbers
        b"0000000\0",
        bytes(155 + 12),  # name prefix, padding
    ]
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def padding(size: int) -> bytes:
    """What fills a member's last block."""
    return bytes(-size % BLOCK)


def complaint(found: bytes, wanted: Member) -> str:
    """Why a header is not the one of the wanted member."""
    if len(found) < BLOCK:
        return "the archive ends early; was it carried completely?"
    name = found[:100].rstrip(b"\0").decode("ascii", "backslashreplace")
    if found == bytes(BLOCK):
        return f"the archive ends before {wanted.name}"
    kind = _KINDS.get(found[156:157])
    if kind is not None:
        return f"member {name!r} is {kind}, which is refused"
    if name.startswith("/") or ".." in name.split("/"):
        return f"member {name!r} would leave the store, which is refused"
    if name != wanted.name:
        return f"member {name!r} stands where {wanted.name} is expected"
    if found[124:136] != header(wanted.name, wanted.stored.size)[124:136]:
        return f"member {name!r} is not of the {wanted.stored.size} bytes that the index says"
    return f"member {name!r} has a header that export does not write"


def describe(index: Index) -> dict[str, Any]:
    """What a bundle holds, for machines."""
    return {
        "runs": [run.key for run in index.runs],
        "objects": len(index.objects),
        "bytes": sum(entry.size for entry in index.objects),
    }
