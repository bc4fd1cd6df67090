"""Do msprobe's own tools read what the store makes of a dump?"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from rlprobe.store.tree import lay_out

pytestmark = [pytest.mark.msprobe, pytest.mark.slow]
pytest.importorskip("msprobe")
torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

TOOLS = """
import sys
from pathlib import Path
from msprobe.core import SingleComparator
from msprobe.pytorch.compare.distributed_compare import compare_distributed

if __name__ == "__main__":
    a, b, out = map(Path, sys.argv[1:])
    steps = [str(side / "actor_update" / "step0") for side in (a, b)]
    compare_distributed(*steps, str(out / "steps"))
    SingleComparator.compare(str(a), str(b), str(out / "single"), num_processes=1)
"""


def as_msprobe_wrote_it(place: Path, shift: float) -> Path:
    """Real tensors in place of the small fixture's bytes."""
    for file in place.rglob("dump_tensor_data/*.pt"):
        rows = 200_000 if "output" in file.name else 4
        torch.save(torch.arange(2.0 * rows).reshape(rows, 2) + shift, file)
    for file in place.rglob("dump.json"):
        text = file.read_text().replace("NaN", "1.0").replace("[\n       2\n      ]", "[4, 2]")
        file.write_text(text)
    for file in place.rglob("*.npy"):
        np.save(file, np.arange(6).reshape(2, 3) + int(shift))
    return place


def rows_of(directory: Path) -> list[dict[str, str]]:
    (file,) = directory.rglob("*.csv")
    with file.open(newline="", encoding="utf-8-sig") as handle:
        return list(csv.DictReader(handle))


def test_msprobe_compares_laid_out_runs_as_it_would_the_originals(
    committed, tmp_path, make_scratch, forked
):
    sides = {}
    for role, shift in (("benchmark", 0.0), ("target", 1.0)):
        place = as_msprobe_wrote_it(make_scratch(tmp_path / role), shift)
        run = committed(role, scratch_at=place)
        assert "dump_data_dir" not in json.loads(
            (run.dump / "actor_update/step0/rank0/dump.json").read_text()
        )
        lay_out(run, tmp_path / f"{role}-tree")
        sides[role] = tmp_path / f"{role}-tree"
        (place / "dump").rename(place / "gone")  # nothing may be found where it was captured
    done = forked.run(TOOLS, sides["target"], sides["benchmark"], tmp_path / "out")
    assert done.returncode == 0, done.stdout[-4000:]
    rows = rows_of(tmp_path / "out" / "steps")
    assert len(rows) == 2
    for row in rows:
        # from the tensors themselves, one packed and one not: every element is off by one
        assert float(row["MaxAbsErr"]) == 1.0, row
        assert row["NPU_Stack_Info"] == "N/A" or "<site-packages>" in row["NPU_Stack_Info"]
    assert any((tmp_path / "out" / "single").iterdir())


def test_msprobe_compares_statistics_in_the_store_itself(committed, tmp_path, forked):
    runs = [
        committed(role, tensors=False, seed=seed, stages=("actor_update",))
        for role, seed in (("benchmark", 0), ("target", 1))
    ]
    steps = [str(run.dump / "actor_update" / "step0") for run in runs]
    command = "import sys\nfrom msprobe.msprobe import main\nsys.exit(main())\n"
    arguments = ["compare", "-tp", steps[1], "-gp", steps[0], "-o", str(tmp_path / "out")]
    done = forked.run(command, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    rows = rows_of(tmp_path / "out")
    assert [row["Max diff"] for row in rows if "input.0" in row["NPU Name"]] == ["1.0"]
