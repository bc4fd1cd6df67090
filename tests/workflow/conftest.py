"""Fixtures of the workflow tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workflow.project import Project


@pytest.fixture
def project(tmp_path: Path, root: Path) -> Project:
    return Project(tmp_path / "project", root)
