"""Publish a finished run: objects first, then its tree with the manifest, in one rename.

Killed at any point, the store shows the run whole or not at all, and a second commit of the same
scratch space completes it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pydantic

from rlprobe import formats, stages
from rlprobe.dumps import logical, records, routing, token_sketches
from rlprobe.errors import IncompleteRunError, StoreError
from rlprobe.store import heal, parts
from rlprobe.store.filetypes import check_type
from rlprobe.store.ingest import Ingested, ingest
from rlprobe.store.manifest import (
    MAX_BYTES,
    File,
    Manifest,
    Process,
    Recorded,
    Stage,
    TokenSketches,
)
from rlprobe.store.objects import Objects
from rlprobe.store.publish import Tree
from rlprobe.store.read import METRICS, METRICS_FORMAT, STATES
from rlprobe.store.workspace import workspace
from rlprobe.version import __version__

_log = logging.getLogger("rlprobe.store")
_ROLLOUT = re.compile(r"step(\d{1,9})\.h5")


def commit(scratch: Path, store: Path, key: str, declared: Mapping[str, Any]) -> Path:
    """Publish what a run left in scratch space; the scratch space stays.

    Args:
        scratch: holds ``dump/`` (the contract's tree) and ``side/`` (everything else).
        store: the store's directory; large files are linked when scratch is on its file system.
        key: the run's key.
        declared: what the key is the digest of; ``role`` and, for a replay, ``replay_of`` are
            read from it.

    Returns:
        The run's manifest.

    Raises:
        StoreError: nothing was captured, the key is not that of what is declared, or a part of
            scratch is not what a run leaves; nothing is published.
        DumpError: a dump file is damaged; nothing is published.
    """
    if not (scratch / "dump").is_dir():
        raise IncompleteRunError(f"{scratch}/dump does not exist: the run left nothing to commit")
    with workspace(store) as work:
        objects = Objects(store, work)
        tree = Tree(work / "run", objects)
        manifest = _Commit(scratch, work, objects, tree).manifest(key, declared)
        for name, stored in tree.files.items():
            check_type(name, objects.where(stored))
        data = manifest.to_bytes()
        # What is committed here is read, exported and imported by others: never less than that.
        where = f"the manifest of {key[:12]}"
        if len(data) > MAX_BYTES or Manifest.from_bytes(data, where) != manifest:
            raise StoreError(f"{where} would not be read back as it was written")
        path = tree.publish(key, data, store)
        heal.spread(store, objects)
    _log.info("run %s: %d files, %.1f MB new", key[:12], len(manifest.files), objects.added / 1e6)
    return path


class _Commit:
    """One commit under way."""

    def __init__(self, scratch: Path, work: Path, objects: Objects, tree: Tree) -> None:
        self.side = scratch / "side"
        self.dump = scratch / "dump"
        self.work = work
        self.objects = objects
        self.tree = tree

    def manifest(self, key: str, declared: Mapping[str, Any]) -> Manifest:
        ingested = ingest(self.dump, self.objects, self.work)
        for path, stored in ingested.files.items():
            self.tree.add(f"dump/{path}", stored)
        tables, frames = self._records(ingested)
        sketches = token_sketches.read(self.side, frames)
        for stage, found in sketches.items():
            self._table(found.table, f"token_sketches/{stage}.parquet")
        for stage, table in logical.read(self.side, set(frames)).items():
            self._table(table, f"logical/{stage}.parquet")
        for stage, table in routing.read(self.side, set(frames)).items():
            self._table(table, f"routing/{stage}.parquet")
        if ingested.tensors:
            self._table(_tensor_table(ingested), "tensors.parquet")
        weights = parts.weights(self.side)
        if weights is not None:
            self._table(weights, "weights.parquet")
        gradients = parts.gradients(self.side)
        if gradients is not None:
            self._table(gradients, "gradients.parquet")
        proof = parts.mock_proof(self.side)
        if proof is not None:
            self._json(proof, "mock_proof.json")
        self._json(parts.environment(self.side), "environment.json")
        metrics = self.side / METRICS
        if metrics.is_file():
            head = json.dumps({"format": METRICS_FORMAT}).encode() + b"\n"
            data = metrics.read_bytes()
            # a second commit of what was a run's own file has the line already
            data = data if data.startswith(head) else head + data
            self.tree.add(METRICS, self.objects.put_bytes(data))
        joined = parts.joined(self.side)
        if joined:
            self._json({"format": parts.FORMAT, "joined": joined}, "joined.json")
        buffers = parts.buffers(self.side)
        if any(row["buffers"] for row in buffers):
            self._json({"format": parts.FORMAT, "buffers": buffers}, "buffers.json")
        optimizers = parts.optimizers(self.side)
        if optimizers:
            self._json({"format": parts.FORMAT, "optimizers": optimizers}, "optimizers.json")
        self._states()
        rollouts = self._rollouts()
        replay_of = declared.get("replay_of")
        # of a perturbed control the trainer's metrics are all there is
        if not (tables or rollouts or ingested.files or METRICS in self.tree.files):
            raise IncompleteRunError(
                f"{self.dump} is empty: nothing was captured, so nothing is committed"
            )
        try:
            return Manifest(
                key=key,
                role=str(declared.get("role")),
                declared=_plain(declared),
                parents=[replay_of] if replay_of else [],
                first_step=parts.first_step(self.side),
                steps=sorted({step for stage in tables.values() for step in stage.steps}),
                stages=_stages(tables, replayed=replay_of is not None or "rollouts" in declared),
                layout=[Process.model_validate(row) for row in parts.layout(self.side)],
                recorded=Recorded(
                    weights={} if weights is None else parts.weights_by_step(weights),
                    samples={} if proof is None else parts.samples_by_step(proof),
                    rollouts=rollouts,
                ),
                token_sketches={
                    stage: TokenSketches(k=found.k, left_out=found.left_out)
                    for stage, found in sketches.items()
                },
                files=[
                    File(path=path, sha256=stored.sha256, size=stored.size)
                    for path, stored in sorted(self.tree.files.items())
                ],
                volatile=_plain(
                    {
                        "run": parts.run_facts(self.side),
                        "captured": parts.captured(self.side),
                        "dump": ingested.removed,
                        "rlprobe": __version__,
                    }
                ),
            )
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, problem["loc"])) or "run"
            raise StoreError(f"cannot commit {key[:12]}: {place}: {problem['msg']}") from error

    def _records(self, ingested: Ingested) -> tuple[dict[str, Stage], dict[str, pl.DataFrame]]:
        """``records/{stage}.parquet`` of every stage directory, built from the canonical tree.

        Also returned: which rows they have, by step, rank, order and name.
        """
        digests: dict[str, dict[str, str]] = {}
        for tensor in ingested.tensors:
            directory, _, below = tensor.path.partition("/")
            digests.setdefault(directory, {})[below] = f"sha256:{tensor.stored.sha256}"
        tables: dict[str, Stage] = {}
        rows: dict[str, pl.DataFrame] = {}
        names = {path.partition("/")[0] for path in ingested.files if "/step" in path}
        for directory in sorted(names):
            stage = stages.ALIASES.get(directory, directory)
            if stage not in stages.STAGES:
                continue  # data/, memory_snapshot/
            if stage in tables:
                raise StoreError(f"{self.dump} holds stage {stage} under two names")
            frame = records.build(
                self.tree.root / "dump" / directory, stage, objects=digests.get(directory)
            )
            if frame.is_empty():
                raise IncompleteRunError(
                    f"{self.dump}/{directory} holds dump files but not one record: nothing of "
                    "this stage was captured, so nothing is committed"
                )
            temporary = self.work / "records.parquet"
            records.write(frame, temporary)
            self._adopt(temporary, f"records/{stage}.parquet")
            rows[stage] = frame.select("step", "rank", "order", "name")
            tables[stage] = Stage(
                state="captured",
                steps=frame["step"].unique().sort().to_list(),
                ranks=frame["rank"].unique().sort().to_list(),
                records=frame.height,
            )
        return tables, rows

    def _rollouts(self) -> dict[str, str]:
        directory = self.side / "rollouts"
        found = {}
        for path in sorted(directory.iterdir()) if directory.is_dir() else []:
            match = _ROLLOUT.fullmatch(path.name)
            if match is None:
                continue  # a temporary file of a killed writer
            stored = self.objects.put_file(path, adopt=True)
            self.tree.add(f"rollouts/{path.name}", stored)
            found[match[1]] = f"sha256:{stored.sha256}"
        return found

    def _states(self) -> None:
        root = self.side / STATES
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                stored = self.objects.put_file(path, adopt=True)
                self.tree.add(f"{STATES}/{path.relative_to(root).as_posix()}", stored)

    def _table(self, frame: pl.DataFrame, path: str) -> None:
        temporary = self.work / "table.parquet"
        kind = path.partition("/")[0].removesuffix(".parquet")
        frame.write_parquet(
            temporary, compression="zstd", statistics=False, metadata=formats.mark(kind)
        )
        self._adopt(temporary, path)

    def _adopt(self, temporary: Path, path: str) -> None:
        self.tree.add(path, self.objects.put_file(temporary, adopt=True))
        temporary.unlink()

    def _json(self, value: Any, path: str) -> None:
        text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True)
        self.tree.add(path, self.objects.put_bytes(text.encode() + b"\n"))


def _stages(tables: Mapping[str, Stage], *, replayed: bool) -> dict[str, Stage]:
    found = dict(tables)
    if replayed and stages.GENERATE not in found:
        steps = sorted({step for stage in tables.values() for step in stage.steps})
        found[stages.GENERATE] = Stage(state="replayed", steps=steps)
    return found


def _tensor_table(ingested: Ingested) -> pl.DataFrame:
    """``tensors.parquet``: where each tensor file's bytes are."""
    return pl.DataFrame(
        [
            (f"dump/{t.path}", f"sha256:{t.stored.sha256}", t.stored.size, t.container, t.offset)
            for t in ingested.tensors
        ],
        schema={
            "path": pl.String,
            "digest": pl.String,
            "size": pl.Int64,
            "container": pl.String,
            "offset": pl.Int64,
        },
        orient="row",
    )


def _plain(value: Any) -> Any:
    """Mappings and tuples as strict JSON has them; numbers that are not finite as text.

    Bytes of an environment that are no text become question marks: no file holds them otherwise.
    """
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return json.loads(text, parse_constant=str)
