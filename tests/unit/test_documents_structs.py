"""Are rlprobe's own files read as what they are, and anything else refused in a sentence?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlprobe.documents import structfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import DumpError


class Plan(msgspec.Struct, frozen=True):
    name: str
    steps: dict[int, int] = {}
    format: int = 2

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("it has no name")


def parsed(text: str, **more: Any) -> Plan:
    return structfile.parse(text.encode(), Plan, (1, 2), "plan.json", **more)


def test_a_file_of_the_last_version() -> None:
    found = parsed('{"format": 2, "name": "a", "steps": {"0": 3}, "later": []}')
    assert found == Plan("a", {0: 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "truncated"),
        ("[" * 100_000, "recursion"),
        ('{"format": 2}', "missing required field `name`"),
        ('{"format": 2, "name": 3}', "Expected `str`, got `int`"),
        ('{"format": 2, "name": ""}', "it has no name"),
    ],
)
def test_what_is_no_such_struct(text: str, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        parsed(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 3, "all": "is new"}', "plan.json was made by a newer rlprobe"),
        ('{"format": true, "name": "a"}', "format True, which is none"),
        ('{"name": "a"}', "format None, which is none"),
        ("[]", "format None, which is none"),
    ],
)
def test_another_version_is_said_before_what_is_in_it(text: str, said: str) -> None:
    with pytest.raises(DumpError, match=said):
        parsed(text)


def test_a_version_may_go_unsaid_or_be_renewed() -> None:
    assert parsed('{"name": "a"}', unmarked=2) == Plan("a")

    def renew(raw: dict[str, Any]) -> None:
        raw["name"] = raw.pop("title")

    assert parsed('{"format": 1, "title": "a"}', renew=renew).name == "a"
    with pytest.raises(DocumentError, match="`name`"):
        parsed('{"format": 2, "title": "a"}', renew=renew)


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(DocumentError, match="cannot be read"):
        structfile.load(path, Plan, (2,))
    path.write_text('{"format": 2, "name": "' + "a" * 100 + '"}')
    assert structfile.load(path, Plan, (2,)).name == "a" * 100
    path.write_text("{}x")
    with pytest.raises(DocumentError, match=r"^is not readable: JSON is malformed"):
        structfile.load(path, Plan, (2,))
    path.write_text("{" + " " * 50)
    with pytest.raises(DocumentError, match="larger than 50 bytes"):
        structfile.load(path, Plan, (2,), most=50)


def test_a_path_that_is_no_utf_8_is_written_out() -> None:
    data = structfile.encoded({"format": 1, "paths": [os.fsdecode(b"/gbk/\xbb\xf9"), "/目录"]})
    said = json.loads(data)
    assert said["paths"][0].startswith("/gbk/\\udcbb")
    assert said["paths"][1] == "/目录"
