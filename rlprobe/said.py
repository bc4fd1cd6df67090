"""Sentences that know how they were made, so that they can be said in another language.

What is found is said in English, in files and on terminals. The page says it in Chinese as well:
for that a sentence is made by :func:`say` from a template, which is its key in the page's catalogue
(``rlprobe/report/assets/sentences.yaml``), and from what is filled in. Sentences put together by
``+`` or :func:`joined` remember their parts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

#: How a text was made, as JSON: a text that is in no language (a name, a number), ``{"key":
#: template, "given": {name: message}}``, or a list of parts.
Message = Any

_FORMATTER = string.Formatter()

#: What is counted and stands behind its number; its only one is told without the last letters.
_COUNTED = re.compile(
    r" (?P<before>recorded |other )?"
    r"(?P<one>record|row|sample|value|token|parameter|stage|rank|step|call|module|embedding|key|layer|"
    r"element|tensor|number|micro-batch(?=es)|process(?=es))(?:es|s)\b"
    r"(?P<verb> (?:have|are|were|differ|agree|lie)\b)?"
)
_OF_ONE = {" have": " has", " are": " is", " were": " was", "": ""}


class Said(str):
    """An English text together with how it was made."""

    message: Message

    def __new__(cls, text: str, message: Message) -> Said:
        made = super().__new__(cls, text)
        made.message = message
        return made

    def __add__(self, other: str) -> Said:
        return _parts([self, other])

    def __radd__(self, other: str) -> Said:
        return _parts([other, self])

    def __reduce__(self) -> tuple[type[Said], tuple[str, Message]]:
        return Said, (str(self), self.message)


def say(template: str, /, **given: Any) -> Said:
    """A sentence of ours.

    Args:
        template: in the language of :meth:`str.format`, fields by name only. It is the sentence's
            key in the catalogue, so it stands in the code as a literal. What is counted stands in
            it as many, and is said as one behind a 1.
        given: what its fields stand for; sentences among them are said in their language too.
    """
    filled: dict[str, Message] = {}
    made: list[str] = []
    before = ""
    for text, name, spec, conversion in _FORMATTER.parse(template):
        made.append(_of_one(text) if before == "1" else text)
        before = ""
        if name is None:
            continue
        value = given[name]
        if isinstance(value, Said) and not spec:
            filled[name], before = value.message, str(value)
        else:
            converted = _FORMATTER.convert_field(value, conversion)
            filled[name] = before = format(converted, spec or "")
        made.append(before)
    message: Message = {"key": template, "given": filled} if filled else {"key": template}
    return Said("".join(made), message)


def term(name: str) -> Said:
    """A name of ours that has another one in other languages, as items of the gate have."""
    return Said(name, {"key": name})


def joined(parts: Iterable[str], separator: Said | str) -> Said:
    """``separator.join(parts)``, which remembers its parts."""
    pieces: list[str] = []
    for part in parts:
        pieces += [separator, part] if pieces else [part]
    return _parts(pieces)


def listed(values: Iterable[str], most: int = 3) -> Said:
    """The first few of some names, and how many more."""
    every = list(values)
    shown = joined(every[:most], COMMA)
    if len(every) <= most:
        return shown
    return say("{shown} and {more} more", shown=shown, more=len(every) - most)


def exactly(text: str) -> Said:
    """A text that is the same in every language: names and numbers, or another's words."""
    return text if isinstance(text, Said) else Said(text, str(text))


def _parts(pieces: list[str]) -> Said:
    parts: list[Message] = []
    for piece in pieces:
        message = message_of(piece)
        parts += message if isinstance(message, list) else [message] if message else []
    return Said("".join(pieces), parts[0] if len(parts) == 1 else parts)


def message_of(text: str) -> Message:
    """How a text was made; the text itself where that is not known."""
    return text.message if isinstance(text, Said) else str(text)


def of_side(name: str) -> Said:
    """A side by its role's name, as it stands in a sentence."""
    return _SIDES.get(name) or exactly(name)


_SIDES = {"benchmark": say("benchmark"), "target": say("target")}

#: A sentence of no words, to which others may be added.
NOTHING_SAID = exactly("")
#: What stands between the parts of a sentence.
COMMA, SEMICOLON, STOP = say(", "), say("; "), say(".")


def replaced(text: Said, old: Said, new: Said) -> Said:
    """A sentence with one of its parts replaced; as it was where that is none of its parts."""
    parts = text.message if isinstance(text.message, list) else [text.message]
    olds = old.message if isinstance(old.message, list) else [old.message]
    for at in range(len(parts) - len(olds) + 1):
        if parts[at : at + len(olds)] == olds:
            news = new.message if isinstance(new.message, list) else [new.message]
            whole = [*parts[:at], *news, *parts[at + len(olds) :]]
            return Said(english(whole), whole)
    return text


def english(message: Message) -> str:
    """A message in English, as :func:`say` made it."""
    return render(message, lambda key: key)


#: Messages of a file: deeper or longer ones than anybody makes are cut.
_DEEPEST, _LONGEST = 16, 20_000


def render(message: Message, template: Callable[[str], str], depth: int = 0) -> str:
    """A message in a language.

    Args:
        message: of a file, so it may hold anything.
        template: the key's template in that language; its fields need no format.
        depth: how deep it stands within another.
    """
    if depth > _DEEPEST:
        return "…"
    if isinstance(message, list):
        return "".join([render(part, template, depth + 1) for part in message])[:_LONGEST]
    if not isinstance(message, Mapping):
        return str(message)[:_LONGEST]
    given = message.get("given")
    filled = {
        str(name): render(value, template, depth + 1)
        for name, value in (given.items() if isinstance(given, Mapping) else ())
    }
    made = []
    before = ""
    for text, name, _, _ in _parsed(template(str(message.get("key")))):
        made.append(_of_one(text) if before == "1" else text)
        before = ""
        if name is not None:
            before = filled.get(name, "")
            made.append(before)
    return "".join(made)[:_LONGEST]


def _of_one(text: str) -> str:
    """What follows a number that is 1: `` records differ`` as `` record differs``."""

    def singular(found: re.Match[str]) -> str:
        verb = found["verb"] or ""
        verb = _OF_ONE.get(verb) or (f"{verb}s" if verb else "")
        return f" {found['before'] or ''}{found['one']}{verb}"

    match = _COUNTED.match(text)
    return text if match is None else singular(match) + text[match.end() :]


def _parsed(template: str) -> Iterable[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(_FORMATTER.parse(template))
    except ValueError:  # no template of ours
        return [(template, None, None, None)]


def fields(template: str) -> set[str]:
    """Names of a template's fields."""
    return {name for _, name, _, _ in _FORMATTER.parse(template) if name is not None}


def kept(value: Any) -> tuple[Any, dict[str, Message]]:
    """Plain data for a file, and how its sentences were made, by sentence.

    Args:
        value: a struct, or what else msgspec can make plain data of.
    """
    messages: dict[str, Message] = {}

    def plain(found: Any) -> Any:
        if isinstance(found, Said):
            if found.message != str(found):
                messages[str(found)] = found.message
            return str(found)
        raise NotImplementedError(f"no plain data of {type(found)}")

    return msgspec.to_builtins(value, enc_hook=plain, str_keys=True), messages


def restored(text: str, messages: Mapping[str, Message]) -> Said:
    """A sentence of a file, with how it was made where the file says so."""
    return Said(text, messages.get(text, text))
