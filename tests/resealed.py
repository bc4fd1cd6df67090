"""Changes a sealed file as its writer would have written it, for tests of what it says."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlprobe.documents import seal
from rlprobe.report import history


@contextlib.contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """What a JSON file says, to be changed; it is written with the digest of what it says then."""
    said = json.loads(path.read_text(encoding="utf-8"))
    yield said
    path.write_text(json.dumps(seal.sealed(said)), encoding="utf-8")


def page(text: str) -> str:
    """A page that was changed, with the digest of what it is now."""
    known = re.compile(r'(<meta name="rlprobe-digest" content="sha256:)[0-9a-f]{64}')
    return history.sealed(known.sub(r"\g<1>" + "0" * 64, text, count=1))
