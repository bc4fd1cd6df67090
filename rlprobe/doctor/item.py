"""One line of the doctor's answer."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Item:
    """What was looked at, how it is, and what to do when it is not well."""

    #: A key of the alignment, or ``store``, ``slurm`` and the like.
    name: str
    state: State
    found: str
    action: str | None = None
    #: Where it was looked at; None for the machine the doctor runs on.
    node: str | None = None

    def line(self) -> str:
        where = f" [{self.node}]" if self.node else ""
        do = f"; do: {self.action}" if self.action else ""
        return f"{self.state:4} {self.name}{where}: {_one_line(self.found)}{do}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _one_line(text: str) -> str:
    """What another program said on several lines, on one: an item is a line, for eyes and grep."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"([:;,.…]); ", r"\1 ", "; ".join(lines))


def ok(name: str, found: str) -> Item:
    return Item(name, "ok", found)


def warn(name: str, found: str, action: str) -> Item:
    return Item(name, "warn", found, action)


def fail(name: str, found: str, action: str) -> Item:
    return Item(name, "fail", found, action)


def skip(name: str, found: str, action: str | None = None) -> Item:
    """Could not be looked at from here."""
    return Item(name, "skip", found, action)
