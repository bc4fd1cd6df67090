"""Are responses that no policy should give noticed, and no others?"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlprobe.cli import main
from rlprobe.rollouts import Ragged, Rollouts, Sample, hdf5
from rlprobe.rollouts.responses import Responses, blank, garbled, look, loops

RANDOM = np.random.default_rng(3)
TEXT = RANDOM.integers(0, 50_000, 200).tolist()


COUNTED = [token for n in range(30) for token in (TEXT[n], *TEXT[100:115])]
MARGINS = [token for n in range(40) for token in (11, TEXT[n], 12)]


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([7] * 16, True),
        ([*TEXT[:40], *[7, 8, 9] * 20], True),
        ([*TEXT[:10], *TEXT[50:80] * 4, TEXT[50]], True),
        ([*TEXT[:40], *[7] * 200, 11], True),  # an end of text behind it
        ([*TEXT[:40], *[7] * 200, *TEXT[50:90]], True),  # it went on after a while
        ([*TEXT[:4], *TEXT[50:150] * 4], True),  # a whole paragraph
        ([*TEXT[:30], *COUNTED], True),  # "Step 1: …", "Step 2: …"
        ([*TEXT, *TEXT[::-1], *[7, 8] * 70], True),  # it began well
        ([7] * 15, False),  # too short to say
        ([*TEXT, *[7] * 20], False),  # a run of zeros in a long answer
        ([*TEXT, *[7, 8] * 70, *TEXT[::-1]], False),  # a table in a long answer
        ([*TEXT[:10], *TEXT[50:80] * 3], False),  # three times may be meant
        (MARGINS, False),  # a list: short marks around what is new each time
        (TEXT, False),
        ([1, 2] * 2, False),
        ([-1] * 20, True),
        ([], False),
    ],
)
def test_a_loop_is_most_of_a_response_or_lasts_to_its_end(tokens: list[int], found: bool) -> None:
    assert loops(tokens) == found
    assert loops(np.array(tokens, dtype=np.int64)) == found


def test_a_long_answer_of_few_words_is_no_loop() -> None:
    """A vocabulary of bytes: every piece of four stands in a long text many times."""
    words = ["the", "sum", "of", "and", "so", "we", "get", "that", "is", "two", "three", "plus"]
    text = " ".join(RANDOM.choice(words, 2000))
    assert not loops(list(text.encode()))


def test_looking_at_long_responses_takes_no_time() -> None:
    rows = [RANDOM.integers(0, 50_000, 8192) for _ in range(16)]
    began = time.process_time()
    assert not any(loops(row) for row in rows)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain text", False), ("多字节文本，正常。", False), ("a\n\tb\r\n", False), ("", False),
        ("\ufffd\ufffd ab", True), ("\x00\x01abc", True), ("one \ufffd in a long text", False),
        ("🙂🙂", False),
        # pieces of a large vocabulary, drawn at random: each is text, and all of it is none
        ("esper تعليم الفصل предприят 図書館 การเรียน Straße выбор", True),
        ("จำนวน लेकिन σπίτι ավելի სახლი haus", True),
        # as people write
        ("Python の関数を使って、カタカナとひらがな、한국어: ok", False),
        ("Let α, β ∈ ℝ and 𝑥 ≤ ½; тогда решение равно 𝛼𝑥", False),
        ("In English, по-русски, and عربي", False),
        ("ﬁne “quotes” — naïve café, ªº, ﬀ", False),
    ],
)  # fmt: skip
def test_garbled_is_what_is_no_text_or_of_no_language(text: str, found: bool) -> None:
    assert garbled(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|im_end|>", True), ("</s>", True), (" \n\u3000\n<eos>", True),
        ("42<|im_end|>", False), ("a < b > c", False), ("< >", False), (".", False),
    ],
)  # fmt: skip
def test_an_end_of_text_alone_is_no_answer(text: str, found: bool) -> None:
    assert blank(text) == found


def test_a_response_of_nothing_but_its_end_is_empty() -> None:
    one = Rollouts(
        0, 1, tensors={"responses": Ragged.from_rows([np.array([2]), np.array([5, 2])])},
        samples=[
            Sample.build("s0", "p", [1], [2], response_text="<eos>"),
            Sample.build("s1", "p", [1], [5, 2], response_text="5<eos>"),
        ],
    )  # fmt: skip
    found = look(one)
    assert found is not None and found.empty == ("s0",)


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
