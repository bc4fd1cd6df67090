"""Are a stage's files found under whatever name their framework gave its directory?"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlprobe import stages
from rlprobe.dumps import places


@pytest.mark.parametrize(
    ("directory", "stage"),
    [(stages.LOG_PROB, stages.LOG_PROB), *stages.ALIASES.items()],
)
def test_a_stage_is_found_by_any_of_its_names(tmp_path: Path, directory: str, stage: str) -> None:
    rank = tmp_path / directory / "step3" / "rank1"
    rank.mkdir(parents=True)
    assert places.of_stage(tmp_path, stage) == tmp_path / directory
    assert places.of_process(tmp_path, stage, 3, 1) == rank


def test_a_stage_that_was_not_dumped_has_no_directory(tmp_path: Path) -> None:
    (tmp_path / "actor_train").mkdir()
    assert places.of_stage(tmp_path, stages.LOG_PROB) is None
    missing = places.of_process(tmp_path, stages.LOG_PROB, 0, 0)
    assert missing == tmp_path / stages.LOG_PROB / "step0" / "rank0" and not missing.exists()
