"""Where a module was called from: the content of stack.json.

Format (mindstudio-probe 26, ``DataWriter.write_stack_info_json``): ``{"0": [[record names],
["File PATH, line N, in FUNCTION, \\n SOURCE", …]], …}``, innermost frame first. Walking sixty
frames for every module call would cost more than the statistics: a nested call therefore walks
to its caller only and shares the rest with the call it is nested in, and text is made once, when
the file is written. Frames and stacks are each one object and are known by it: Python makes the
hash of a piece of code anew, from its constants and names, wherever it is looked up.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal

_OWN = str(Path(__file__).resolve().parent) + os.sep
_TORCH_CALL = str(Path("torch", "nn", "modules", "module.py"))


class Site:
    """A frame: its code and the line being executed."""

    __slots__ = ("code", "line", "text")

    def __init__(self, code: CodeType, line: int) -> None:
        self.code = code
        self.line = line
        #: msprobe's text, once it was asked for; False until then.
        self.text: str | Literal[False] | None = False


class _Sites:
    """The sites in one piece of code, which it keeps alive, so that its id stays its own."""

    __slots__ = ("by_instruction", "by_line", "code", "plumbing")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        path = code.co_filename
        #: Frames of ours and of ``Module.__call__`` change their line while a call is under way.
        self.plumbing = path.startswith(_OWN) or path.endswith(_TORCH_CALL)
        self.by_instruction: dict[int, Site] = {}
        self.by_line: dict[int, Site] = {}

    def at(self, frame: FrameType) -> Site:
        """Where a frame of this code is."""
        site = self.by_instruction.get(frame.f_lasti)
        if site is None:
            line = frame.f_lineno
            site = self.by_line.get(line)
            if site is None:
                site = self.by_line[line] = Site(self.code, line)
            self.by_instruction[frame.f_lasti] = site
        return site


class Stack:
    """A frame and what it was called from; the same frames from the same ones are one object."""

    __slots__ = ("_within", "outer", "site")

    def __init__(self, site: Site | None, outer: Stack | None) -> None:
        self.site = site
        self.outer = outer
        self._within: dict[Site, Stack] = {}

    def within(self, site: Site) -> Stack:
        """The stack of a call that is made in this one's innermost frame."""
        found = self._within.get(site)
        if found is None:
            found = self._within[site] = Stack(site, self)
        return found


#: The stack without frames.
_EMPTY = Stack(None, None)
_codes: dict[int, _Sites] = {}
_encoded: dict[Stack, str] = {}
#: Stacks whose text is kept.
_KEPT = 10_000


class Trace:
    """A captured stack, and the frame from which it can be shared by nested calls."""

    __slots__ = ("anchor", "shared", "stack")

    def __init__(self, stack: Stack, anchor: FrameType | None, shared: Stack) -> None:
        self.stack = stack
        #: The caller's frame: it cannot return while the call lasts, so its line stays.
        self.anchor = anchor
        #: The stack from that frame on.
        self.shared = shared


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
    stack = _EMPTY
    while frame is not None:
        if outer is not None and frame is shared:
            stack = outer.shared
            break
        code = frame.f_code
        known = _codes.get(id(code))
        if known is None:
            known = _codes[id(code)] = _Sites(code)
        if anchor is None and not known.plumbing:
            anchor, anchor_at = frame, len(sites)
        sites.append(known.at(frame))
        frame = frame.f_back
    from_anchor = stack
    for at in range(len(sites) - 1, -1, -1):
        stack = stack.within(sites[at])
        if at == anchor_at:
            from_anchor = stack
    return Trace(stack, anchor, from_anchor)


def _line(site: Site) -> str | None:
    """msprobe's text of a frame; None where the source is not to be had or is ours."""
    code, number = site.code, site.line
    path = code.co_filename
    source = linecache.getline(path, number).strip()
    if not source or path.startswith(_OWN):
        return None
    return f"File {path}, line {number}, in {code.co_name}, \n {source}"


def lines(stack: Stack) -> list[str]:
    """The text of every frame of a stack, innermost first."""
    found: list[str] = []
    here: Stack | None = stack
    while here is not None and here.site is not None:
        site = here.site
        if site.text is False:
            site.text = _line(site)
        if site.text is not None:
            found.append(site.text)
        here = here.outer
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
