"""Records by coordinates of experts' own rows: the same however experts are divided.

Real megatron-core on the CPU, two ranks over gloo with half of the samples and half of the experts
each, against one process with all. It needs none but megatron-core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from rlprobe.dumps import logical
from rlprobe.dumps.routing import read as read_routing
from tests.installed import needs
from tests.unit.capture_helpers import UPDATE

pytestmark = [pytest.mark.slow, needs("megatron.core")]

EXPERTS = "model.layers.1.mlp.experts"
TOKENS = 39
Found = dict[tuple[str, str, str], dict[str, Any]]


def captured(root: Path, directory: Path, dispatcher: str, world: int) -> Path:
    script = Path(__file__).with_name("capture_experts_run.py")
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), dispatcher, str(rank), str(world),
             str(directory)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), "\n".join(said)[-4000:]
    return directory / "side"


def summed(side: Path) -> Found:
    """Every record, those of all ranks added up."""
    found: Found = {}
    for row in logical.read(side, {UPDATE})[UPDATE].iter_rows(named=True):
        own = found.setdefault(
            (row["module"], row["direction"], row["slot"]),
            {"sketch": np.zeros(488), "squares": 0.0, "tokens": 0, "identity": 0, "ranks": []},
        )
        own["sketch"] = own["sketch"] + np.array(row["sketch"])
        own["squares"] += row["squares"]
        own["tokens"] += row["tokens"]
        own["identity"] = (own["identity"] + int(row["identity"], 16)) % 2**64
        own["ranks"].append(row["rank"])
    return found


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(root, tmp_path_factory.mktemp("whole"), "alltoall", 1)


@pytest.mark.parametrize(
    "dispatcher", ["alltoall", pytest.param("allgather", marks=pytest.mark.long)]
)
def test_experts_on_two_ranks_have_the_records_of_one(
    dispatcher: str, whole: Path, root: Path, tmp_path: Path
) -> None:
    side = captured(root, tmp_path, dispatcher, 2)
    one, two = summed(whole), summed(side)
    assert one.keys() == two.keys()
    for key, theirs in one.items():
        ours, norm = two[key], np.sqrt(theirs["squares"])
        for name in ("tokens", "identity"):
            assert ours[name] == theirs[name], (key, name)
        assert np.allclose(ours["sketch"], theirs["sketch"], atol=3e-6 * norm), key
        assert ours["squares"] == pytest.approx(theirs["squares"], rel=1e-4), key
    # the container has a row a token, from the ranks that have the tokens; an expert has those rows
    # that chose it, on its own rank alone
    rows: Counter[int] = Counter()
    for number in range(4):
        own = two[f"{EXPERTS}.{number}.down_proj", "forward", "output"]
        assert own["ranks"] == [number // 2]
        rows[number] = own["tokens"]
    assert rows.total() == 2 * TOKENS
    for direction in ("forward", "backward"):
        for slot in ("input", "output"):
            own = two[EXPERTS, direction, slot]
            assert own["tokens"] == TOKENS and own["ranks"] == [0, 1]
    # whoever is sent where is the same, token by token
    chosen = [read_routing(each, {UPDATE})[UPDATE] for each in (whole, side)]
    tables = [table.sort("module", "token").drop("rank") for table in chosen]
    assert tables[0].height == 2 * TOKENS and tables[0].equals(tables[1])


def test_what_experts_are_given_and_give_is_what_their_layer_is(whole: Path) -> None:
    found = summed(whole)
    layer = EXPERTS.rpartition(".")[0]
    for slot in ("input", "output"):
        own, around = found[EXPERTS, "forward", slot], found[layer, "forward", slot]
        assert np.allclose(own["sketch"], around["sketch"], atol=1e-5)
    # each expert's results add up to it
    parts = [found[f"{EXPERTS}.{number}", "forward", "output"]["sketch"] for number in range(4)]
    given = found[EXPERTS, "forward", "output"]
    assert np.allclose(sum(parts), given["sketch"], atol=1e-5 * np.sqrt(given["squares"]))
