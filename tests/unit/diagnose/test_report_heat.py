"""Tokens by layers: is a cell as dark as its token's error is many times the floor?"""

from __future__ import annotations

import re
from typing import Any

import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.compare.samples import sketches
from rlprobe.dumps.results import TOKEN_SKETCHES
from rlprobe.errors import DumpError
from rlprobe.report import heat
from rlprobe.rollouts import hdf5
from tests.unit.compare_helpers import put_table
from tests.unit.diagnose.conftest import Align, Alignment
from tests.unit.diagnose.planted import FORWARD
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

EPSILON = next(fault for fault in FORWARD if fault.name == "epsilon of a norm")
STAGE = "actor_compute_log_prob"
TOKENS = 12


@pytest.fixture
def alignment(align: Align) -> Alignment:
    made = align(Device(split=True, faults=EPSILON.faults, stage=EPSILON.only))
    assert main(["diagnose", str(made.results)]) == 0
    return made


def sketched(alignment: Alignment, times: float) -> str:
    """Write token sketches: two layers, of which the second's last token differs."""
    path = alignment.results / "compare" / "target" / STAGE
    records = _parts(alignment)[1].stage.rows.filter(
        (pl.col("slot") == "output")
        & pl.col("name").str.contains(r"layers\.\d+\.mlp\.")
        & (pl.col("call") == 0)
        & (pl.col("floor") > 0)
    )
    names = records.get_column("name").unique(maintain_order=True).to_list()[:2]
    floors = {n: records.filter(pl.col("name") == n).item(0, "floor") for n in names}
    run = next((alignment.store / "runs").glob(f"{alignment.keys['benchmark']}/rollouts/step*.h5"))
    sample = hdf5.read(run).samples[0].sample_digest
    rows = [
        {
            "step": 0, "order": order, "name": name, "sample": sample, "occurrence": 0,
            "token": token, "response_at": 7, "rank_benchmark": 0, "rank_target": 0,
            "error": floors[name] * (times if order and token == TOKENS - 1 else 0.1),
            "error_uncertainty": 0.1,
        }
        for order, name in enumerate(names)
        for token in range(TOKENS)
    ]  # fmt: skip
    put_table(path, TOKEN_SKETCHES, pl.DataFrame(rows, schema=sketches.SCHEMA))
    return sample


def cells(page: str) -> list[str]:
    return re.findall(r'<rect class="h(\d)"', page)


@pytest.mark.parametrize(("times", "shade"), [(2.0, "1"), (50.0, "3"), (1e9, "5")])
def test_a_token_beyond_its_floor_stands_out(
    alignment: Alignment, times: float, shade: str
) -> None:
    sketched(alignment, times)
    assert main(["diagnose", str(alignment.results)]) == 0
    assert main(["report", str(alignment.results)]) == 0
    page = (alignment.results / "report.html").read_text(encoding="utf-8")
    assert cells(page) == ["0"] * (2 * TOKENS - 1) + [shade]
    assert f"{TOKENS} tokens" in page and "response from token 7" in page
    assert f"token {TOKENS - 1}, {times:.3g} ×" in page


def test_without_sketches_per_token_there_is_no_map(alignment: Alignment) -> None:
    assert main(["report", str(alignment.results)]) == 0
    assert not cells((alignment.results / "report.html").read_text(encoding="utf-8"))


def test_a_damaged_table_is_an_error(alignment: Alignment) -> None:
    sketched(alignment, 2.0)
    path = alignment.results / "compare" / "target" / STAGE / TOKEN_SKETCHES
    path.write_bytes(b"PAR1")
    with pytest.raises(DumpError, match=r"token_sketches\.parquet has 4 bytes"):
        heat.build(*_parts(alignment))


def _parts(alignment: Alignment) -> tuple[Any, ...]:
    from rlprobe.judge.inputs import Results, require
    from rlprobe.judge.judge import judge
    from rlprobe.roles import BENCHMARK

    results = Results.open(alignment.results)
    found = judge(results, 0).findings[STAGE]
    return results, found, require(results, BENCHMARK), None


def test_many_tokens_share_cells_and_the_worst_is_shown() -> None:
    count = 1000
    table = pl.DataFrame(
        {
            "order": [0] * count,
            "name": ["Module.model.layers.3.Block.forward.0.output.0"] * count,
            "token": list(range(count)),
            "times": [500.0 if token == 777 else 0.1 for token in range(count)],
        }
    )
    drawn = str(heat._drawn(table))
    shades = cells(drawn)
    assert len(shades) <= heat.COLUMNS and shades.count("4") == 1
    assert "token 777, 500 ×" in drawn and ">layer 3<" in drawn and ">第 3 层<" in drawn


def test_decoding_is_one_row_a_block() -> None:
    """A block runs once a token then; each of its forwards is of another token, in the one row."""
    names = [f"Module.model.layers.{layer}.Block.forward.{call}.output.0" for call in range(6)
             for layer in (0, 1)]  # fmt: skip
    table = pl.DataFrame(
        {
            "order": list(range(12)),
            "name": names,
            "token": [call for call in range(6) for _ in (0, 1)],
            "times": [0.5] * 11 + [20.0],
        }
    )
    drawn = str(heat._drawn(table))
    assert cells(drawn) == ["0"] * 11 + ["3"]
    assert drawn.count(">layer ") == 2
