"""Sentences are said in English and Chinese: nothing is found that only one language can tell."""

from __future__ import annotations

import ast
import html
import json
import re
from pathlib import Path

import msgspec
import pytest

from rlprobe import said
from rlprobe.diagnose import sentence
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.judge import reasons
from rlprobe.judge.inputs import Plan
from rlprobe.report import words
from rlprobe.said import Said, exactly, joined, listed, of_side, replaced, say


def templates(root: Path) -> dict[str, str]:
    """Every template in the code, and where it is."""
    found = {}
    for path in sorted((root / "rlprobe").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id == "say"
            ):
                where = f"{path.relative_to(root)}:{call.lineno}"
                template = call.args[0]
                assert isinstance(template, ast.Constant), f"{where}: the template is no literal"
                found[str(template.value)] = where
    return found


def has_words(template: str) -> bool:
    return re.search("[A-Za-z]", re.sub(r"\{[^}]*\}", "", template)) is not None


def test_everything_that_is_said_has_its_chinese(root: Path) -> None:
    used = {t: where for t, where in templates(root).items() if has_words(t)}
    catalogue = words.chinese()
    assert {t: where for t, where in used.items() if t not in catalogue} == {}
    assert [t for t in catalogue if has_words(t) and t not in used] == [], "said by nobody"
    assert len(used) > 300


def test_both_languages_fill_in_the_same() -> None:
    for english, chinese in words.chinese().items():
        assert said.fields(english) == said.fields(chinese), english
        assert "{" not in re.sub(r"\{\w+\}", "", chinese), f"no formats: {chinese}"
        assert chinese.strip(), english
        if has_words(english) and len(english) > 40:
            assert re.search("[\u4e00-\u9fff]", chinese), chinese


def test_every_reason_has_its_chinese() -> None:
    for reason in [*reasons.EXCUSES, *reasons.UNJUDGED]:
        shown = words.reason(reason)
        assert 'lang="zh"' in shown and re.search("[\u4e00-\u9fff]", shown), reason


def chinese(text: Said) -> str:
    catalogue = words.chinese()
    return said.render(text.message, lambda key: catalogue.get(key, key))


def test_a_sentence_keeps_numbers_as_they_were_written() -> None:
    text = say(
        "{count:,} records of {stages} differ by up to {size} at positions that no log-prob, "
        "value, loss or gradient depends on (padding), since all of these agree: {found}",
        count=12345, stages=say("{count} stages", count=2), size=exactly("0.5"),
        found=listed(["a", "b", "c", "d"], 2),
    )  # fmt: skip
    assert text.startswith("12,345 records of 2 stages differ by up to 0.5")
    assert text.endswith("a, b and 2 more")
    assert chinese(text).startswith("2 个阶段的 12,345 条记录相差至多 0.5")
    assert chinese(text).endswith("a、b 等，另有 2 项")
    assert said.english(text.message) == text


def test_parts_are_remembered_through_sums_and_joins() -> None:
    text = joined([say("nothing was compared"), "weights"], said.SEMICOLON) + said.STOP
    assert text == "nothing was compared; weights."
    assert chinese(text) == "没有比较任何内容；weights。"
    assert chinese("x: " + say("nothing was compared")) == "x: 没有比较任何内容"  # type: ignore[arg-type]
    assert chinese(of_side("target")) == "目标" and of_side("repeat") == "repeat"


def test_a_part_is_replaced_in_both_languages() -> None:
    first, second = say(" Its cause is not known."), say("nothing was compared")
    whole = say("step {step}", step=3) + said.STOP + first + say("; one caveat")
    other = replaced(whole, first, second)
    assert other == "step 3.nothing was compared; one caveat"
    assert chinese(other) == "第 3 步。没有比较任何内容；1 项需注意"
    assert replaced(whole, second, first) == whole


class Written(msgspec.Struct):
    text: str
    more: list[str]


def test_files_keep_english_and_how_it_was_made() -> None:
    plain, messages = said.kept(
        Written(say("step {step}", step=1), ["a name", say("nothing was compared")])
    )
    assert plain == {"text": "step 1", "more": ["a name", "nothing was compared"]}
    assert type(plain["text"]) is str
    again = json.loads(json.dumps(messages))
    assert set(again) == {"step 1", "nothing was compared"}
    assert chinese(said.restored("step 1", again)) == "第 1 步"
    assert said.restored("a name", again).message == "a name"


@pytest.mark.parametrize(
    "message",
    [None, 3, [[[["x"]]]], {"key": None}, {"key": "{step"}, {"key": "step {step}"},
     {"key": "step {step}", "given": 4}, {"given": {"step": []}}, {"key": "{0.__class__}"}],
)  # fmt: skip
def test_messages_of_a_file_are_shown_and_never_obeyed(message: object) -> None:
    shown = words.sentence("English", {"English": message})
    assert "English" in shown and "class '" not in shown


def test_a_message_that_doubles_itself_is_cut() -> None:
    message: object = "x" * 100
    for _ in range(200):
        message = {
            "key": "the target's largest and smallest numbers are {rounded_to} numbers, the "
            "benchmark's are not both, and the unbiased error of {error:.2g} is what a rounding "
            "to {rounded_to} makes",
            "given": {"rounded_to": message},
        }
    assert len(words.sentence("English", {"English": message})) < 100_000


def test_markup_in_a_message_is_text() -> None:
    text = say("step {step}", step="<b>1</b>")
    shown = words.sentence(text, {})
    assert "<b>" not in shown and "&lt;b&gt;" in shown and "第 &lt;b&gt;" in shown


@pytest.mark.parametrize(
    ("item", "chinese"),
    [("weights", "权重"), ("mock proof", "同一批 rollout"), ("nobody's", "nobody's")],
)
def test_an_item_that_refuses_is_called_by_its_name_in_either_language(
    item: str, chinese: str
) -> None:
    found = GateItem(item, "shut", say("nothing was compared"), "")
    plan = Plan("a", "store", {}, {})
    text = sentence.not_comparable(plan, [found])
    assert str(text).startswith(f"a: no verdict, the runs cannot be compared. {item}: nothing")
    shown = str(words.sentence(text, {}))
    assert chinese in html.unescape(shown.split('lang="zh"')[1])
