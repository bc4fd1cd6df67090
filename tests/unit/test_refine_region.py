"""Does every block begin from the other side's numbers, and is the region where they differ?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rlprobe.errors import DumpError  # noqa: E402
from rlprobe.refine import region  # noqa: E402
from rlprobe.refine.blocks import blocks  # noqa: E402
from rlprobe.spec import Suspects  # noqa: E402
from rlprobe.store.commit import commit  # noqa: E402
from rlprobe.store.keys import run_key  # noqa: E402
from rlprobe.store.read import Run  # noqa: E402
from tests.unit.capture_helpers import UPDATE, rank_dir, recorder, tokens  # noqa: E402
from tests.unit.traced import model  # noqa: E402

BLOCKS = ("embed", "layers.0", "layers.1", "head")


def rows(floor: float = 1e-5) -> pl.DataFrame:
    paths = ["embed", "layers.0", "layers.0.norm", "layers.0.gate", "layers.1", "layers.1.norm",
             "head", "layers.0"]  # fmt: skip
    return pl.DataFrame({
        "order": range(len(paths)), "module": paths, "direction": "forward", "slot": "output",
        "judged": True, "floor": floor,
    })  # fmt: skip


def test_blocks_follow_each_other_and_none_is_within_another() -> None:
    assert blocks(rows()) == BLOCKS
    whole = pl.concat([rows().select("order", "module", "direction"),
                       pl.DataFrame({"order": [99], "module": ["layers"], "direction": "forward"})],
                      how="vertical_relaxed")  # fmt: skip
    assert blocks(whole) == BLOCKS
    one = rows().filter(pl.col("module") == "head")
    assert blocks(one) == (), "a single module is no run of blocks"


def ran(root: Path, change: Any, **options: Any) -> Path:
    made = model()
    change(made)
    chosen = recorder(root, blocks=BLOCKS, micro_steps=(1,), **options)
    with chosen.stage(UPDATE, 0, 1, made) as scope:
        for index in range(3):
            scope.micro_step(index)
            made(tokens())
    return rank_dir(root) / "outputs"


def shown(tmp_path: Path, change: Any, floor: float = 1e-5) -> region.Region:
    kept = ran(tmp_path / "b", lambda _: None, keep_outputs=True)
    declared = {"role": "target", "name": str(tmp_path)}
    (tmp_path / "t" / "side").mkdir(parents=True)
    ran(tmp_path / "t", change, substitute=str(kept))
    key = run_key(declared)
    commit(tmp_path / "t", tmp_path / "store", key, declared)
    wanted = Suspects(UPDATE, 0, 0, (), (1,), "record", blocks=BLOCKS)
    return region.look(Run.open(tmp_path / "store", key), wanted, rows(floor))


def scaled(*paths: str, by: float) -> Any:
    def change(made: nn.Module) -> None:
        for path in paths:
            part = made.get_submodule(path)
            part.register_forward_hook(lambda _m, _a, output: output * (1 + by))

    return change


def test_a_block_that_differs_by_itself_is_the_region(tmp_path: Path) -> None:
    found = shown(tmp_path, scaled("layers.1.norm", by=1e-2))
    assert (found.first, found.last, found.beyond) == ("layers.1", "layers.1", ["layers.1"])
    sizes = {block.module: block.error for block in found.blocks}
    assert sizes["layers.1"] > 1e-4
    assert sizes["embed"] == sizes["layers.0"] == sizes["head"] == 0.0, "each begins anew"
    assert "it alone differs" in found.said


def test_differences_that_add_up_are_no_single_place(tmp_path: Path) -> None:
    found = shown(tmp_path, scaled("layers.0", "layers.1", by=1e-4), floor=1e-3)
    assert found.beyond == [] and (found.first, found.last) == ("layers.0", "layers.1")
    assert "none differs by more than its floor (at most 0.1 of it)" in found.said
    several = shown(tmp_path / "2", scaled("embed", "layers.1", by=1e-2))
    assert (several.first, several.last) == ("embed", "layers.1")
    assert "2 differ by themselves" in several.said and len(several.blocks) == 4


def test_what_runs_between_blocks_is_said(tmp_path: Path) -> None:
    found = shown(tmp_path, lambda _: None)
    assert found.said.endswith("none differs; what runs between them makes the difference")


def test_what_was_not_kept_is_said(tmp_path: Path) -> None:
    kept = ran(tmp_path / "b", lambda _: None, keep_outputs=True, tensor_budget=64)
    (tmp_path / "t" / "side").mkdir(parents=True)
    ran(tmp_path / "t", lambda _: None, substitute=str(kept))
    declared = {"role": "target", "name": str(tmp_path)}
    commit(tmp_path / "t", tmp_path / "store", run_key(declared), declared)
    wanted = Suspects(UPDATE, 0, 0, (), (1,), "record", blocks=BLOCKS)
    found = region.look(Run.open(tmp_path / "store", run_key(declared)), wanted, rows())
    assert found.first is None and "did not fit into the budget" in found.said


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = region.Region("s", [region.Block("a", 0.1, None)], "a", "a", ["a"], "said", [])
    assert region.read(tmp_path) is None
    path = region.write(tmp_path, found)
    assert region.read(tmp_path) == found
    path.write_text(path.read_text().replace('"a"', '"b"', 1))
    with pytest.raises(DumpError, match=r"region\.json .*; refine again"):
        region.read(tmp_path)
