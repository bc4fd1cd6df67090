"""msprobe's own construct.json names the module that a function was called by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.dumps import construct
from tests.forked import Forked

pytestmark = [pytest.mark.msprobe, pytest.mark.slow]
pytest.importorskip("torch")
pytest.importorskip("msprobe")

HERE = Path(__file__).parent


def test_a_real_dump_says_which_module_called_a_function(
    forked: Forked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One weight of the second block's last projection is 5 % larger on the target."""
    for side, scale in (("b", "1"), ("t", "1.05")):
        done = forked.run(HERE / "dump_model.py", tmp_path / f"m-{side}", "statistics",
                          "statistics", scale)  # fmt: skip
        assert done.returncode == 0, done.stdout
        (process,) = (tmp_path / f"m-{side}/step0").iterdir()
        process.rename(tmp_path / side)
    told = construct.read(tmp_path / "b" / construct.NAME)
    assert told["Functional.linear.3.forward"] == "Module.layers.1.down.Linear.forward.0"
    assert told["Module.layers.1.Block.forward.0"] is None
    dumped = json.loads((tmp_path / "b/dump.json").read_text())["data"]
    assert {name for name in dumped if ".parameters_grad" not in name} <= told.keys()

    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "out")]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "First to part: layers.1.down (Linear), in unnamed, step 0, rank 0"
    assert lines[1].strip() == "Functional.linear.3.forward.input.1, in layers.1.down"

    # msprobe leaves it empty at level L1: what was called by what is then told by the order alone
    for side in "bt":
        (tmp_path / side / construct.NAME).write_text("{}")
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("First to part: layers.1 (Block), in")
