"""Are responses that no policy should give noticed, and no others?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlprobe.cli import main
from rlprobe.rollouts import Ragged, Rollouts, Sample, hdf5
from rlprobe.rollouts.responses import Responses, garbled, look, loops

RANDOM = np.random.default_rng(3)
TEXT = RANDOM.integers(0, 50_000, 200).tolist()


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([7] * 16, True),
        ([*TEXT[:40], *[7, 8, 9] * 20], True),
        ([*TEXT[:10], *TEXT[50:80] * 4, TEXT[50]], True),
        ([*TEXT[:40], *[7] * 200, 11], False),  # it went on
        ([7] * 15, False),  # too short to say
        ([*TEXT, *[7] * 20], False),  # a run of zeros in a long answer
        ([*TEXT[:10], *TEXT[50:80] * 3], False),  # three times may be meant
        ([*TEXT[:4], *TEXT[50:90] * 4], False),  # a longer piece than is looked for
        (TEXT, False),
        ([1, 2] * 2, False),
        ([], False),
    ],
)
def test_a_loop_is_most_of_a_response_and_lasts_to_its_end(tokens: list[int], found: bool) -> None:
    assert loops(tokens) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain text", False), ("多字节文本，正常。", False), ("a\n\tb\r\n", False), ("", False),
        ("\ufffd\ufffd ab", True), ("\x00\x01abc", True), ("one \ufffd in a long text", False),
        ("🙂🙂", False),
    ],
)  # fmt: skip
def test_garbled_is_what_has_many_characters_that_are_none(text: str, found: bool) -> None:
    assert garbled(text) == found


def rollouts(texts: bool = True, ragged: bool = False, limit: Any = 20) -> Rollouts:
    rows = [[7] * 20, TEXT[:12], [], TEXT[:20]]
    shown = ["aaaa", "\ufffd\ufffd", "", "fine"] if texts else [""] * 4
    width = 20
    padded = np.array([[*row, *[0] * (width - len(row))] for row in rows])
    mask = np.array([[1, *[1] * len(row), *[0] * (width - len(row))] for row in rows])
    tensors: dict[str, Any] = {"responses": Ragged.from_rows([np.array(r, int) for r in rows])}
    if not ragged:
        tensors = {"responses": padded, "attention_mask": mask, "prompts": np.ones((4, 1), int)}
    return Rollouts(
        0, 1, tensors=tensors, sampling={"response_length": limit},
        samples=[
            Sample.build(f"s{n}", "p", [n], row, response_text=text)
            for n, (row, text) in enumerate(zip(rows, shown, strict=True))
        ],
    )  # fmt: skip


@pytest.mark.parametrize("ragged", [True, False])
def test_each_kind_is_named_by_its_samples(ragged: bool) -> None:
    assert look(rollouts(ragged=ragged)) == Responses(4, ("s2",), ("s0",), ("s1",), ("s0", "s3"))


def test_what_was_not_recorded_is_not_known() -> None:
    found = look(rollouts(texts=False, limit=None))
    assert found is not None and (found.garbled, found.cut) == (None, None)
    bare = rollouts()
    del bare.tensors["attention_mask"]
    assert look(bare) is None


def test_rollouts_show_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hdf5.write(tmp_path / "step0.h5", rollouts())
    out = tmp_path / "shown.json"
    assert main(["rollouts", "show", str(tmp_path / "step0.h5"), "--json", str(out)]) == 0
    said = "responses: looping 1 of 4, garbled 1 of 4, empty 1 of 4, as long as they may be 2 of 4"
    assert said in capsys.readouterr().out
    assert json.loads(out.read_text())["responses"]["looping"] == ["s0"]
