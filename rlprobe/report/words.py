"""The page's texts in both its languages.

Its own are in ``assets/words.yaml``; what was found is said in English by whoever found it, and in
Chinese by ``assets/sentences.yaml`` (:mod:`rlprobe.said`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup, escape

from rlprobe import causes
from rlprobe.judge import reasons
from rlprobe.report.printable import printable
from rlprobe.said import Message, Said, render

LANGUAGES = ("en", "zh")
_FILE = Path(__file__).parent / "assets" / "words.yaml"
_SENTENCES = _FILE.with_name("sentences.yaml")


@functools.cache
def _texts(part: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))[part]
    return found


def every() -> dict[str, list[str]]:
    """All texts by key, each in the order of :data:`LANGUAGES`."""
    return {key: [found[name] for name in LANGUAGES] for key, found in _texts("words").items()}


def as_script() -> str:
    """All texts as JSON that cannot end the element it stands in."""
    return json.dumps(every(), ensure_ascii=False).replace("<", "\\u003c")


def text(key: str, language: str, **given: Any) -> str:
    """One text in one language.

    Raises:
        KeyError: there is no such text.
    """
    return _texts("words")[key][language].format(**given)


def both(key: str, **given: Any) -> Markup:
    """One text in both languages, of which the page's style shows one; escaped."""
    return pair(*(text(key, language, **given) for language in LANGUAGES))


def label(key: str, **given: Any) -> Markup:
    """An element's label for a screen reader, in both languages; as attributes, escaped.

    Args:
        key: of the text.
        given: what is filled in; a name of a text stands for that text.
    """
    known = _texts("words")
    said = [
        text(
            key,
            language,
            **{name: known[v][language] if v in known else v for name, v in given.items()},
        )
        for language in LANGUAGES
    ]
    english, chinese = map(printable, said)
    return Markup(' aria-label="{0}" data-label-en="{0}" data-label-zh="{1}"').format(
        english, chinese
    )


def drawn(key: str, **given: Any) -> Markup:
    """A text within a drawing, in both languages; escaped."""
    return Markup('<tspan lang="en">{}</tspan><tspan lang="zh">{}</tspan>').format(
        *(text(key, language, **given) for language in LANGUAGES)
    )


def together(*parts: tuple[str, dict[str, Any]]) -> Markup:
    """Several texts as one, in both languages: each by its key and what is filled in."""
    return pair(
        *("".join(text(key, language, **given) for key, given in parts) for language in LANGUAGES)
    )


@functools.cache
def chinese() -> dict[str, str]:
    """What is found, in Chinese, by its English template."""
    found: dict[str, str] = yaml.safe_load(_SENTENCES.read_text(encoding="utf-8"))
    return found


def sentence(text: str, messages: Mapping[str, Message]) -> Markup:
    """What was found, in both languages; escaped.

    Args:
        text: a sentence in English.
        messages: how sentences were made; one that is not among them is shown in English alone.
    """
    known = text.message if isinstance(text, Said) else messages.get(text)
    if known is None:
        return escape(printable(str(text)))
    return pair(str(text), render(known, _chinese))


def _chinese(key: str) -> str:
    """A template or an item of the gate in Chinese; what has no other words keeps its own."""
    return chinese().get(key) or _texts("items").get(key, {}).get("zh", key)


def reason(name: str) -> Markup:
    """What a reason of :mod:`rlprobe.judge.reasons` means, in both languages."""
    known = {**reasons.EXCUSES, **reasons.UNJUDGED}
    english = known.get(name, "")
    return pair(english, _texts("reasons").get(name, {}).get("zh", english))


def cause(class_: str) -> Markup:
    """What a class of causes means, in both languages."""
    return pair(causes.MEANINGS[class_], _texts("causes")[class_]["zh"])


def advice(class_: str) -> Markup:
    """Where to look first for a cause of this class, in both languages."""
    found = _texts("advice")[class_]
    return pair(found["en"], found["zh"])


def plain_advice(class_: str) -> str:
    """The same in English alone."""
    return _texts("advice")[class_]["en"]


def item(name: str) -> Markup:
    """An item of the gate in both languages; one that has no other name keeps its own."""
    found = _texts("items").get(name, {})
    return pair(found.get("en", name), found.get("zh", name))


def plain_item(name: str) -> str:
    """The same in English alone, for a terminal or a pull request."""
    return _texts("items").get(name, {}).get("en", name)


def value(name: str) -> Markup:
    """What a number of a record is called in both languages; what has no name keeps its own."""
    found = _texts("values").get(name, {})
    return pair(found.get("en", name), found.get("zh", name))


def pair(english: str, chinese: str) -> Markup:
    """Two texts of one meaning, of which the page's style shows one; escaped."""
    shown = [printable(text) for text in (english, chinese)]
    if shown[0] == shown[1]:
        return escape(shown[0])
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(*shown)
