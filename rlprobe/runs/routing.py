"""The benchmark's choices of experts, laid out for the processes of a run that replays them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from rlprobe import stages
from rlprobe.errors import StoreError
from rlprobe.store.read import Run

#: Directory below a run's scratch.
ROUTING = "routing"


def lay_out(store: Path, benchmark: str, directory: Path) -> None:
    """Write a file a stage and step, as :mod:`rlprobe.capture.replayed_routing` reads it.

    Args:
        store: where the benchmark's run is.
        benchmark: its key.
        directory: below the scratch of the run that replays.

    Raises:
        StoreError: the benchmark has no choices of experts, or a table is damaged.
    """
    run = Run.open(store, benchmark)
    directory.mkdir(parents=True, exist_ok=True)
    written = 0
    for stage in stages.STAGES:
        table = run.routing(stage)
        for (step,), own in () if table is None else table.group_by("step", maintain_order=True):
            _write(directory / f"{stage}-step{step}.npz", own)
            written += 1
    if not written:
        raise StoreError(
            f"routing: replay: the benchmark {benchmark[:12]} has no choices of experts: its "
            "model has no routers that were recorded; set routing: own"
        )


def _write(path: Path, table: pl.DataFrame) -> None:
    once = table.unique(["module", "token"], keep="first", maintain_order=True)
    modules = once.group_by("module", maintain_order=True).agg(pl.col("experts").first())
    names = modules.get_column("module").to_list()
    width = int(once.select(pl.col("chosen").list.len().max()).item())
    chosen = np.full((once.height, width), -1, np.int16)
    for row, own in enumerate(once.get_column("chosen")):
        chosen[row, : len(own)] = own.to_numpy()
    number = {name: at for at, name in enumerate(names)}
    np.savez(
        path,
        modules=np.array(names, dtype=np.str_),
        experts=modules.get_column("experts").to_numpy(),
        module=np.array([number[name] for name in once.get_column("module")], np.int32),
        token=once.get_column("token").to_numpy(),
        chosen=chosen,
        left_out=np.int64(0),
    )
