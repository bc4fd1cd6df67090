"""The answer of a substitution: is it read as it was written, and refused where it was changed?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlprobe.errors import DumpError
from rlprobe.refine import substitution
from rlprobe.refine.substitution import Substituted

FOUND = Substituted(
    "model.norm", "actor_update", 4, ["call 5: of another shape"], False, "lm_head parts next",
    "lm_head", "Module.lm_head.Linear.forward.0.output.0", 12.5,
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "refine").mkdir()
    return substitution.write_found(tmp_path, FOUND)


def test_it_comes_back_as_it_was_written(tmp_path: Path, path: Path) -> None:
    assert substitution.read(tmp_path) == FOUND
    path.unlink()
    assert substitution.read(tmp_path) is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("agrees", True, "changed"),
        ("excess", 0.5, "changed"),
        ("format", 2, "newer rlprobe"),
        ("calls", "many", "changed"),
    ],
)
def test_one_that_was_changed_is_refused(
    tmp_path: Path, path: Path, key: str, value: object, said: str
) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DumpError, match=said):
        substitution.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}'])
def test_what_is_no_answer_is_damage(tmp_path: Path, path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(DumpError, match=r"again|this rlprobe reads 1"):
        substitution.read(tmp_path)
