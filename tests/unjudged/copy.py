"""A copy of a finished alignment in which files of its runs are changed, and which is judged again.

Unlike the laboratory of ``rlprobe selftest --pass blind``, which disturbs one quantity of the
target at a time, any number of files of any run may change at once: what both sides lack, or have
alike, is the point.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.diagnose.run import Examined, examine
from rlprobe.errors import NotComparableError, RlprobeError
from rlprobe.judge.inputs import Results
from rlprobe.judge.judge import Kept
from rlprobe.roles import TARGET
from rlprobe.selftest.blind.laboratory import Laboratory
from rlprobe.store.manifest import NAME as MANIFEST
from rlprobe.store.manifest import File, Manifest

Change = Callable[[bytes], bytes | None]


class Copy(Laboratory):
    """An alignment's copy; :meth:`judged` compares every stage anew and judges all of it."""

    def __init__(self, results: Path, directory: Path) -> None:
        """
        Args:
            results: a finished alignment that is aligned.
            directory: where the copy goes; emptied first.
        """
        super().__init__(results, directory)
        self.runs = {
            role: self._store / "runs" / run.key for role, run in self._found.plan.runs.items()
        }

    def files(self, role: str, pattern: str) -> list[str]:
        """Files of a run that a glob matches, relative to it."""
        root = self.runs[role]
        return sorted(p.relative_to(root).as_posix() for p in root.glob(pattern) if p.is_file())

    def change(self, role: str, name: str, change: Change) -> None:
        """Another content of a file; none where ``change`` gives None."""
        self.changed(role, {name: change((self.runs[role] / name).read_bytes())})

    def changed(self, role: str, contents: dict[str, bytes | None]) -> None:
        """Other contents of files, and a manifest as the run would have had with them."""
        root = self.runs[role]
        manifest = Manifest.load(root)
        kept = {file.path: file for file in manifest.files}
        for name, data in contents.items():
            (root / name).unlink(missing_ok=True)
            kept.pop(name, None)
            if data is not None:
                (root / name).write_bytes(data)
                kept[name] = File(
                    path=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data)
                )
        stages = dict(manifest.stages)
        for name in contents:
            stage = name.removeprefix("records/").removesuffix(".parquet")
            if name.startswith("records/") and stage in stages and (root / name).exists():
                rows = pl.read_parquet(root / name).height
                stages[stage] = stages[stage].model_copy(update={"records": rows})
        files = [kept[path] for path in sorted(kept)]
        said = manifest.model_copy(update={"files": files, "stages": stages})
        self._replace(root / MANIFEST, said.to_bytes())

    def remove(self, role: str, pattern: str) -> int:
        """Take files away; how many."""
        names = self.files(role, pattern)
        self.changed(role, dict.fromkeys(names))
        root = self.runs[role]
        for directory in sorted(
            {path for name in names for path in (root / name).parents}, reverse=True
        ):
            if root in directory.parents and not any(directory.iterdir()):
                directory.rmdir()  # a run that never had the files has no place for them
        return len(names)

    def table(self, role: str, name: str, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
        """Another table in place of one."""

        def of(data: bytes) -> bytes:
            old = pl.read_parquet(io.BytesIO(data))
            mark = pl.read_parquet_metadata(io.BytesIO(data))
            out = io.BytesIO()
            kept = {k: v for k, v in mark.items() if not k.startswith("ARROW")}
            change(old).cast(old.schema).write_parquet(out, metadata=kept)
            return out.getvalue()

        self.change(role, name, of)

    def array(
        self, role: str, name: str, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
    ) -> None:
        """Another array in place of one."""

        def of(data: bytes) -> bytes:
            out = io.BytesIO()
            np.save(out, change(np.load(io.BytesIO(data)).copy()), allow_pickle=False)
            return out.getvalue()

        self.change(role, name, of)

    def document(self, role: str, name: str, change: Callable[[Any], Any]) -> None:
        """Another JSON in place of one."""
        self.change(role, name, lambda data: json.dumps(change(json.loads(data))).encode())

    def metrics(self, role: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Other metrics of every step."""

        def of(data: bytes) -> bytes:
            lines = [json.loads(line) for line in data.splitlines()]
            for line in lines:
                if "metrics" in line:
                    line["metrics"] = change(line["metrics"])
            return b"".join(json.dumps(line).encode() + b"\n" for line in lines)

        self.change(role, "metrics.jsonl", of)

    def judged(self) -> Examined | str:
        """All stages of every pair compared anew, and judged; or the error that it ended in."""
        for pair, planned in self._found.plan.pairs.items():
            left, right = (
                sides.resolve(str(self.runs[role]), None)
                for role in (planned.benchmark, planned.target)
            )
            out = self.results / "compare" / pair
            shutil.rmtree(out, ignore_errors=True)
            try:
                compare(
                    left,
                    right,
                    out,
                    Options(pair, tuple(planned.stages), self._found.plan.coverage),
                )
            except NotComparableError:
                pass  # it has written what there was to say
            except RlprobeError as error:
                return str(error)
        try:
            return examine(Results.open(self.results), Kept())
        except RlprobeError as error:
            return str(error)


__all__ = ["TARGET", "Change", "Copy"]
