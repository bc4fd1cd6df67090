"""A simple command of bash's, told apart into assignments, words and redirections.

Run by itself inside a traced script (:mod:`.trace`), so it needs the standard library only:

    python -I -S words.py 'A=1 python train.py "$@" > log'

prints bash that sets ``__rlp_a`` (assignments), ``__rlp_w`` (words), ``__rlp_f`` (the first word)
and ``__rlp_r`` (1 where output goes to a file). Nothing is expanded: bash does that, itself.
"""

from __future__ import annotations

import re
import shlex
import sys

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?=")
#: What bash shows of these is no command with words.
_COMPOUND = re.compile(r"(for|case|select) |\(\(|\[\[ ")
#: A redirection's descriptor and operator; ``<(`` begins a word.
_REDIRECTION = re.compile(r"(\d*|&|\{[A-Za-z_]\w*\})(<<<|<<-?|<>|<&|>>|>\||>&|>(?!\()|<(?!\())")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


def split(text: str) -> tuple[list[str], list[str], list[str]]:
    """Assignments, words and redirections of a command, each as it is written.

    Raises:
        ValueError: a quote or a bracket is not closed.
    """
    assignments: list[str] = []
    words: list[str] = []
    redirections: list[str] = []
    at = 0
    while at < len(text):
        if text[at] in " \t\n":
            at += 1
            continue
        operator = _REDIRECTION.match(text, at)
        if operator is not None:
            end = operator.end()
            while end < len(text) and text[end] in " \t":
                end += 1
            target, end = _word(text, end)
            redirections.append(operator.group() + target)
            if operator.group(2).startswith("<<") and operator.group(2) != "<<<":
                # the document follows; the command ends before it
                newline = text.find("\n", end)
                text = text[: newline if newline >= 0 else len(text)]
            at = end
            continue
        word, at = _word(text, at)
        if not words and _ASSIGNMENT.match(word):
            assignments.append(word)
        else:
            words.append(word)
    return assignments, words, redirections


def _word(text: str, at: int) -> tuple[str, int]:
    """The word that begins at ``at``, and where it ends."""
    begin = at
    while at < len(text):
        sign = text[at]
        if sign in " \t\n" or (sign in "<>" and at > begin and text[at + 1 : at + 2] != "("):
            break
        if sign == "(" and _ASSIGNMENT.fullmatch(text[begin:at]):
            at = _closed(text, at)  # an array
        elif sign in "<>" and text[at + 1 : at + 2] == "(":
            at = _closed(text, at + 1)  # a process substitution
        else:
            at = _part(text, at)
    return text[begin:at], at


def _part(text: str, at: int) -> int:
    """Where the quotation, expansion or sign at ``at`` ends."""
    sign = text[at]
    if sign == "\\":
        return min(at + 2, len(text))
    if sign == "'":
        return _find(text, "'", at + 1)
    if text.startswith("$'", at):
        at += 2
        while at < len(text) and text[at] != "'":
            at += 2 if text[at] == "\\" else 1
        return _find(text, "'", at)
    if sign == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = _part(text, at) if text[at] in "\\$`" else at + 1
        return _find(text, '"', at)
    if sign == "`":
        at += 1
        while at < len(text) and text[at] != "`":
            at += 2 if text[at] == "\\" else 1
        return _find(text, "`", at)
    if sign == "$" and text[at + 1 : at + 2] in ("(", "{"):
        return _closed(text, at + 1)
    return at + 1


def _closed(text: str, at: int) -> int:
    """Where the bracket at ``at`` is closed, quotations and brackets inside it skipped."""
    opening, closing, depth = text[at], _CLOSING[text[at]], 0
    while at < len(text):
        if text[at] == opening:
            depth += 1
            at += 1
        elif text[at] == closing:
            depth -= 1
            at += 1
            if depth == 0:
                return at
        else:
            at = _part(text, at) if text[at] in "\\'\"`$" else at + 1
    raise ValueError(f"no {closing}")


def _find(text: str, sign: str, at: int) -> int:
    found = text.find(sign, at)
    if found < 0:
        raise ValueError(f"no closing {sign}")
    return found + 1


def to_a_file(redirections: list[str]) -> bool:
    """Whether one of them writes anything but ``/dev/null`` or another descriptor."""
    for redirection in redirections:
        operator = _REDIRECTION.match(redirection)
        if operator is None or not operator.group(2).startswith((">", "<>")):
            continue
        target = redirection[operator.end() :]
        duplicate = operator.group(2) == ">&" and re.fullmatch(r"\d+-?|-", target)
        if not duplicate and target != "/dev/null":
            return True
    return False


def described(text: str) -> str:
    """The answer in bash; a command that is not understood has no words, and is not run."""
    if _COMPOUND.match(text):
        return "__rlp_a= __rlp_w= __rlp_f= __rlp_r=0"
    try:
        assignments, words, redirections = split(text)
    except ValueError:
        return "__rlp_a= __rlp_w=unreadable __rlp_f=unreadable __rlp_r=1"
    values = {
        "__rlp_a": " ".join(assignments),
        "__rlp_w": " ".join(words),
        "__rlp_f": words[0] if words else "",
        "__rlp_r": str(int(to_a_file(redirections))),
    }
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())


if __name__ == "__main__":
    print(described(sys.argv[1]))
