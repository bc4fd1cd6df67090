"""Where the bytes of a run's tensor files are, packed or not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import polars as pl

from rlprobe.dumps.paths import check_path
from rlprobe.errors import StoreError


class Span(NamedTuple):
    """A ``.pt`` file's content: bytes ``offset`` to ``offset + size`` of ``file``."""

    file: Path
    offset: int
    size: int
    #: ``sha256:…`` of that content.
    digest: str


def spans(run: Path, directory: str) -> dict[str, Span]:
    """The tensor files of one rank directory by file name; empty when it has none.

    Args:
        run: the run's directory, ``{store}/runs/{key}``.
        directory: below ``dump/``, such as ``actor_update/step0/rank0``.

    Raises:
        StoreError: the table of tensors is damaged, or names bytes that are not there.
    """
    table = run / "tensors.parquet"
    if not table.is_file():
        return {}
    prefix = f"dump/{directory}/dump_tensor_data/"
    try:
        rows = (
            pl.scan_parquet(table, glob=False)
            .filter(pl.col("path").str.starts_with(prefix))
            .select("path", "digest", "size", "container", "offset")
            .collect()
            .rows()
        )
        return {
            path[len(prefix) :]: _span(run, path, digest, size, container, offset)
            for path, digest, size, container, offset in rows
        }
    except (OSError, ValueError, TypeError, pl.exceptions.PolarsError) as error:
        raise StoreError(f"{table} is damaged: {error}") from error


def _span(run: Path, path: str, digest: str, size: int, container: str | None, offset: int) -> Span:
    inside = path if container is None else f"dump/{container}"
    check_path(inside)
    file = run / inside
    if offset < 0 or size < 0 or offset + size > file.stat().st_size:
        raise ValueError(f"{path} is said to lie outside {inside}")
    return Span(file, offset, size, digest)
