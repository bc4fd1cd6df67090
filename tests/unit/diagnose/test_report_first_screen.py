"""Does who reads the verdict alone know what it means, and what to do?"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlprobe import said
from rlprobe.causes import CAUSES, MEANINGS
from rlprobe.diagnose import curves as trainer
from rlprobe.diagnose import diagnosis, sentence
from rlprobe.diagnose.diagnosis import DIVERGED, Cause, Diagnosis, GateItem
from rlprobe.judge import tables
from rlprobe.judge.curves import LEFT, WITHIN, Curve
from rlprobe.judge.inputs import Results, require
from rlprobe.report import advice, commands, words
from rlprobe.report.content import Page, gather
from rlprobe.report.page import render
from rlprobe.report.plain import markdown
from rlprobe.report.summary import lines
from rlprobe.said import exactly, say
from rlprobe.terminal import Paint

pytestmark = pytest.mark.slow

Gathered = Callable[[Diagnosis], Page]


@pytest.fixture
def gathered(results: Path) -> Gathered:
    """The page of a diagnosis of the diverged alignment."""
    opened = Results.open(results)
    sides: list[Any] = [require(opened, role) for role in ("benchmark", "target")]
    return lambda found: gather(opened, found, tables.read(opened), *sides)


def left(by: Any = "controls") -> Curve:
    return Curve(
        "actor/loss", LEFT, step=2, steps=6, at=2, benchmark=1.0, target=2.0, difference=1.0,
        allowed=0.1, by=by,
    )  # fmt: skip


def of_trainer(found: Diagnosis, curve: Curve) -> Diagnosis:
    """A diagnosis in which no record parts, and a curve of the trainer's does."""
    return msgspec.structs.replace(
        found, first=trainer.first(curve), cause=trainer.cause([curve], curve), curves=[curve],
        sentence="they part in the trainer's curves",
    )  # fmt: skip


def test_every_cause_has_a_meaning_and_advice_in_both_languages() -> None:
    for class_ in CAUSES:
        for text in (words.cause(class_), words.advice(class_)):
            english, _, chinese = text.partition('</span><span lang="zh">')
            assert english.removeprefix('<span lang="en">').strip(), class_
            assert any("\u4e00" <= letter <= "\u9fff" for letter in chinese), class_


def test_the_cause_is_said_once_and_then_what_it_is_and_what_to_do(
    results: Path, gathered: Gathered
) -> None:
    cause = Cause("hyperparameter", "observed", say("1 metric"), [])
    whole = exactly("They part here.") + sentence.why(cause) + say(" Judged: all.")
    _, messages = said.kept([whole, cause.statement])
    found = msgspec.structs.replace(
        diagnosis.answer(results), cause=cause, sentence=str(whole), messages=messages
    )
    page = gathered(found)
    assert page.headline is not None and page.kind is not None and page.advice is not None
    assert advice.without_cause(found) == "They part here. Judged: all."
    assert "They part here." in page.sentence and "1 metric" not in page.sentence
    assert "原因" not in page.sentence, "left out of the Chinese sentence too"
    assert words.plain_advice("hyperparameter") in markdown(found).replace("\\", "")
    assert any("to do" in line for line in lines(results, found, Paint(io.StringIO())))


@pytest.mark.parametrize("class_", ["row_order", "hyperparameter", "nonfinite"])
def test_the_first_words_are_of_the_kind_and_then_comes_what_was_found(
    results: Path, gathered: Gathered, class_: str
) -> None:
    """Who only reads the headline knows what kind of thing it is, whatever operators were named."""
    statement = say("{what}, given to aten::index.Tensor as self, differs", what="batch values")
    cause = Cause(class_, "observed", statement, [])
    found = msgspec.structs.replace(diagnosis.answer(results), cause=cause)
    first = render(gathered(found)).partition('id="h-verdict"')[2].partition("</section>")[0]
    headline, _, rest = first.partition("</h2>")
    assert MEANINGS[class_] in headline and "aten" not in headline
    assert "aten::index.Tensor" in rest.partition("</p>")[0]
    for plain in (markdown(found), "\n".join(lines(results, found, Paint(io.StringIO())))):
        assert plain.count("aten::index.Tensor") == 1
        assert f"{MEANINGS[class_]}: batch values" in plain


@pytest.mark.parametrize("verdict", ["aligned", "not_comparable"])
def test_nobody_is_told_to_mend_a_target_that_was_not_found_wrong(
    results: Path, verdict: Any
) -> None:
    found = msgspec.structs.replace(diagnosis.answer(results), verdict=verdict)
    assert advice.to_mend(Results.open(results), found) is None and advice.plain(found) is None


@pytest.mark.parametrize(
    ("by", "advised"), [("controls", "steps.start and steps.end to 2"), ("records", "metric")]
)
def test_a_metric_has_no_rank_no_inputs_and_no_calls(
    results: Path, gathered: Gathered, by: str, advised: str
) -> None:
    found = of_trainer(diagnosis.answer(results), left(by))
    assert found.verdict == DIVERGED
    page = gathered(found)
    assert page.meaning == "diverged_metric_means"
    assert page.card is not None and page.card.inputs is None
    labels = " ".join(str(label) for label, _, _ in page.card.pairs)
    assert "Metric" in labels and "Rank" not in labels and "Operator" not in labels
    assert advised in str(page.advice)
    every = [command.text for command in (*page.next, *page.commands)]
    assert every and not any("--stage" in text for text in every)
    assert "rank 0" not in "\n".join(lines(results, found, Paint(io.StringIO())))
    card = render(page).partition('id="first"')[2].partition("</section>")[0]
    assert "actor/loss" in card and "What went into it" not in card
    plain = markdown(found)
    assert "| metric | actor/loss |" in plain and "| rank |" not in plain


@pytest.mark.parametrize("of_dumps", [True, False], ids=["two dumps", "an alignment"])
def test_what_was_refused_is_said_once_and_what_to_mend_comes_first(
    results: Path, gathered: Gathered, of_dumps: bool
) -> None:
    statement = say("88 of 808 recorded parameters differ")
    item = GateItem("weights", "shut", statement, say("start both sides from the same checkpoint"))
    found = msgspec.structs.replace(
        diagnosis.answer(results), verdict="not_comparable", gate=[item],
        cause=Cause("weights", "observed", statement, []),
        sentence=f"no verdict, the runs cannot be compared. weights: {statement}",
    )  # fmt: skip
    opened = dataclasses.replace(Results.open(results), of_dumps=of_dumps)
    sides: list[Any] = [require(opened, role) for role in ("benchmark", "target")]
    (command,) = commands.next_steps(opened, found, *sides)
    label = str(command.label).removeprefix('<span lang="en">')
    assert label.startswith("start both sides from the same checkpoint")
    assert ("dump and compare again" in command.label) is of_dumps
    verdict = render(gathered(found)).partition('id="h-verdict"')[2].partition("</div>")[0]
    assert verdict.count("88 of 808") == 1
    assert MEANINGS["weights"] in verdict


def test_no_two_tables_are_called_the_same(results: Path, gathered: Gathered) -> None:
    """Who hears the page goes from table to table by their names."""
    within = msgspec.structs.replace(left(), metric="actor/entropy", verdict=WITHIN)
    found = msgspec.structs.replace(diagnosis.answer(results), curves=[left(), within])
    page = render(gathered(found)).partition("<noscript>")[0]
    page += render(gathered(found)).rpartition("</noscript>")[2]
    for language in ("en", "zh"):
        names = re.findall(rf'role="region"[^>]* data-label-{language}="([^"]*)"', page)
        assert len(names) > 5 and sorted(names) == sorted(set(names))


def test_trends_alone_are_no_judged_step(results: Path, gathered: Gathered) -> None:
    found = diagnosis.answer(results)
    one = next(iter(found.extent.values()))[0]
    none = msgspec.structs.replace(one, judged=0)
    extent = {stage: {**steps, 1: none, 2: none} for stage, steps in found.extent.items()}
    extent["trainer"] = dict.fromkeys(range(6), one)
    page = gathered(msgspec.structs.replace(found, extent=extent))
    assert (page.judged_steps, page.other_steps) == ([0], [1, 2])
    said = render(page).partition('id="stages"')[2].partition("</p>")[0]
    assert "Judged step: 0" in said and "each from the benchmark" not in said
    assert "not judged" in said and "1, 2" in said
