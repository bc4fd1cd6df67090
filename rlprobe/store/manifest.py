"""A run's manifest: what it declared, what it recorded, and every file it has."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, field_validator, model_validator

from rlprobe import formats, stages
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.dumps.paths import DIRECTORIES as DIRECTORIES
from rlprobe.dumps.paths import FILES as FILES
from rlprobe.dumps.paths import check_path
from rlprobe.errors import StoreError
from rlprobe.store import copies
from rlprobe.store.keys import run_key

FORMAT = 1
NAME = "manifest.json"
#: A manifest is read whole; one with a million files is a third of this.
MAX_BYTES = 512 << 20

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class File(_Model):
    """One file of the run's tree; its content is the object of that digest."""

    path: str
    sha256: Digest
    size: Annotated[int, Field(ge=0)]

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        check_path(path)
        return path


class Stage(_Model):
    """What was captured of one stage, or that generation was replaced."""

    state: Literal["captured", "replayed"]
    steps: list[int] = []
    ranks: list[int] = []
    #: Rows of ``records/{stage}.parquet``; 0 for a replayed stage.
    records: int = 0


class Process(_Model):
    """Where one training process stood in the parallel layout."""

    role: str
    rank: int
    world_size: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    #: The process's own coordinates; null where the framework did not say.
    tp_rank: int | None = None
    pp_rank: int | None = None
    dp_rank: int | None = None
    cp_rank: int | None = None
    ep_rank: int | None = None
    #: Megatron's model chunks on this rank, and whether its activations are a part of the sequence.
    chunks: int | None = None
    sequence_parallel: bool | None = None
    backend: str | None = None


class Recorded(_Model):
    """Digests that say at a glance whether two runs had the same."""

    #: Step to digest over (role, name, digest) of every parameter.
    weights: dict[str, str] = {}
    #: Step to digest over the samples trained on, in no order.
    samples: dict[str, str] = {}
    #: Step to digest of its rollout file.
    rollouts: dict[str, str] = {}


class TokenSketches(_Model):
    """What ``token_sketches/{stage}.parquet`` holds."""

    #: Numbers in a sketch.
    k: int
    #: Tokens that the disk budget did not admit.
    left_out: int = 0


class Manifest(_Model):
    """``{store}/runs/{key}/manifest.json``: a run exists where this file does."""

    format: Literal[1] = 1
    key: Digest
    role: str
    #: Everything the key is the digest of.
    declared: dict[str, Any]
    #: Runs this one depends on: the one whose rollouts it replayed.
    parents: list[Digest] = []
    #: The trainer's number of step 0; None when no process said so.
    first_step: int | None = None
    #: Captured steps, counted from 0.
    steps: list[int] = []
    stages: dict[str, Stage] = {}
    layout: list[Process] = []
    recorded: Recorded = Recorded()
    token_sketches: dict[str, TokenSketches] = {}
    files: list[File]
    #: Facts that differ between equal runs: places, times, what was taken out of the dump.
    volatile: dict[str, Any] = {}

    @field_validator("stages")
    @classmethod
    def _canonical_stages(cls, value: dict[str, Stage]) -> dict[str, Stage]:
        unknown = sorted(set(value) - set(stages.STAGES))
        if unknown:
            raise ValueError(f"unknown stage {unknown[0]!r}")
        return {name: value[name] for name in stages.STAGES if name in value}

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        check_tree(file.path for file in self.files)
        if run_key(self.declared) != self.key:
            raise ValueError(f"what is declared does not give the key {self.key}")
        return self

    def to_bytes(self) -> bytes:
        """The file's content, the same for the same manifest: a line a member, a line a file."""
        value = self.model_dump(mode="json")
        files = ",\n".join(map(_line, value.pop("files")))
        members = [f"{_line(name)}:{_line(value[name])}" for name in sorted(value)]
        return ("{" + ",\n".join([*members, f'"files":[\n{files}]']) + "}\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Parse :meth:`to_bytes`'s output.

        Raises:
            StoreError: not JSON, another format version, or a member of another type.
        """
        try:
            raw = jsonfile.parse(data)
        except DocumentError as error:
            raise StoreError(f"{where}: {error}") from error
        found = raw.get("format") if isinstance(raw, dict) else None
        formats.check(found, (FORMAT,), where, StoreError)
        try:
            return cls.model_validate(raw)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, problem["loc"])) or "manifest"
            raise StoreError(f"{where}: {place}: {problem['msg']}") from error

    @classmethod
    def load(cls, run: Path) -> Manifest:
        """The manifest of a run directory, held against its copy where the store has one.

        Raises:
            StoreError: there is none, it is damaged, or :meth:`from_bytes` refuses it.
        """
        path = run / NAME
        wanted = copies.digests(run.parent.parent, run.name)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise StoreError(f"{path} is larger than {MAX_BYTES} bytes")
            data = path.read_bytes()
        except FileNotFoundError as error:
            if wanted:
                raise StoreError(
                    f"{path} is gone, its copy is there: {_mend(run)} puts it back"
                ) from error
            raise StoreError(f"{path} does not exist: the run was never completed here") from error
        if wanted and hashlib.sha256(data).hexdigest() not in wanted:
            raise StoreError(
                f"{path} is not what was committed: it was changed or damaged; {_mend(run)} puts "
                "back what was"
            )
        return cls.from_bytes(data, str(path))


def _mend(run: Path) -> str:
    return f"`rlprobe store verify --repair --store {shlex.quote(str(run.parent.parent))}`"


def _line(value: Any) -> str:
    """JSON on one line: runs have many files, and a repeat of a run should cost next to nothing."""
    return json.dumps(
        value, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False
    )


def check_tree(paths: Iterable[str]) -> None:
    """Refuse paths that cannot all exist.

    Raises:
        ValueError: one occurs twice, or is the directory of another.
    """
    files: set[str] = set()
    directories: set[str] = set()
    for path in paths:
        if path in files:
            raise ValueError(f"path {path!r} occurs twice")
        files.add(path)
        parts = path.split("/")
        directories.update("/".join(parts[:i]) for i in range(1, len(parts)))
    both = files & directories
    if both:
        raise ValueError(f"path {min(both)!r} is a file and a directory")
