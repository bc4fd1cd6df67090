"""The page's own texts in both its languages, from ``assets/words.yaml``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup, escape

LANGUAGES = ("en", "zh")
_FILE = Path(__file__).parent / "assets" / "words.yaml"


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


def item(name: str) -> Markup:
    """An item of the gate in both languages; one that has no other name keeps its own."""
    found = _texts("items").get(name, {})
    return pair(found.get("en", name), found.get("zh", name))


def pair(english: str, chinese: str) -> Markup:
    """Two texts of one meaning, of which the page's style shows one; escaped."""
    if english == chinese:
        return escape(english)
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(english, chinese)
