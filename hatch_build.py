"""Puts ``rlprobe.pth`` at the root of site-packages, in normal and editable installs alike.

Python runs that one line at the start of every process, which is how capture reaches processes
that the framework starts itself. Without RLPROBE_CONFIG in the environment it does nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PthHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        kind = "force_include_editable" if version == "editable" else "force_include"
        build_data[kind][str(Path(self.root, "rlprobe.pth"))] = "rlprobe.pth"
