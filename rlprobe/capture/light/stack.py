"""Where a module was called from: the content of stack.json.

Format (mindstudio-probe 26, ``DataWriter.write_stack_info_json``): ``{"0": [[record names],
["File PATH, line N, in FUNCTION, \\n SOURCE", …]], …}``, innermost frame first. Walking sixty
frames for every module call would cost more than the statistics: a nested call therefore walks
to its caller only and shares the rest with the call it is nested in, and text is made once, when
the file is written.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

#: A frame: its code and the line being executed.
Site = tuple[CodeType, int]
Stack = tuple[Site, ...]

_OWN = str(Path(__file__).resolve().parent) + os.sep
_TORCH_CALL = str(Path("torch", "nn", "modules", "module.py"))

_text: dict[Site, str | None] = {}
#: Frames and stacks come again with every step: each is one object, and its text is made once.
_sites: dict[CodeType, dict[int, Site]] = {}
_encoded: dict[Stack, str] = {}
#: Stacks whose text is kept.
_KEPT = 10_000
_foreign: dict[CodeType, bool] = {}


def _is_plumbing(code: CodeType) -> bool:
    """Frames of ours and of ``Module.__call__`` change their line while a call is under way."""
    known = _foreign.get(code)
    if known is None:
        path = code.co_filename
        known = path.startswith(_OWN) or path.endswith(_TORCH_CALL)
        _foreign[code] = known
    return known


class Trace:
    """A captured stack, and the frame from which it can be shared by nested calls."""

    __slots__ = ("anchor", "anchor_at", "sites")

    def __init__(self, sites: Stack, anchor: FrameType | None, anchor_at: int) -> None:
        self.sites = sites
        #: The caller's frame: it cannot return while the call lasts, so its line stays.
        self.anchor = anchor
        self.anchor_at = anchor_at


def trace(outer: Trace | None) -> Trace:
    """The stack of the module call being made, without frames of ours.

    Args:
        outer: trace of the enclosing module call, or None.
    """
    sites: list[Site] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    anchor: FrameType | None = None
    anchor_at = 0
    shared = outer.anchor if outer is not None else None
    while frame is not None:
        if outer is not None and frame is shared:
            sites.extend(outer.sites[outer.anchor_at :])
            break
        code = frame.f_code
        if anchor is None and not _is_plumbing(code):
            anchor, anchor_at = frame, len(sites)
        sites.append(_site(code, frame.f_lineno))
        frame = frame.f_back
    return Trace(tuple(sites), anchor, anchor_at)


def _site(code: CodeType, line: int) -> Site:
    known = _sites.get(code)
    if known is None:
        known = _sites[code] = {}
    site = known.get(line)
    if site is None:
        site = known[line] = (code, line)
    return site


def _line(site: Site) -> str | None:
    """msprobe's text of a frame; None where the source is not to be had or is ours."""
    code, number = site
    path = code.co_filename
    source = linecache.getline(path, number).strip()
    if not source or path.startswith(_OWN):
        return None
    return f"File {path}, line {number}, in {code.co_name}, \n {source}"


def lines(stack: Stack) -> list[str]:
    """The text of every frame of a stack, innermost first."""
    found: list[str] = []
    for site in stack:
        if site not in _text:
            _text[site] = _line(site)
        text = _text[site]
        if text is not None:
            found.append(text)
    return found


class Stacks:
    """Names grouped by the stack they were called with, in order of appearance."""

    def __init__(self) -> None:
        self._names: dict[Stack, list[str]] = {}

    def add(self, name: str, stack: Stack) -> None:
        names = self._names.get(stack)
        if names is None:
            self._names[stack] = [name]
        else:
            names.append(name)

    def text(self) -> str:
        """stack.json."""
        parts = [
            f'"{index}": [{json.dumps(names)}, {_lines_text(stack)}]'
            for index, (stack, names) in enumerate(self._names.items())
        ]
        return "{" + ", ".join(parts) + "}"


def _lines_text(stack: Stack) -> str:
    found = _encoded.get(stack)
    if found is None:
        if len(_encoded) >= _KEPT:
            _encoded.clear()
        found = _encoded[stack] = json.dumps(lines(stack))
    return found
