"""Skip what needs a package that is not installed, without importing that package to find out.

Every process of the suite collects every file and runs a few of them: what megatron-core, verl or
transformers take to import is paid where a test uses them.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """A mark for a file or a test: skipped where one of ``packages`` cannot be found."""
    missing = [package for package in packages if not _found(package)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def _found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a parent
        return False
