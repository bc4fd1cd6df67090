"""A working directory as a user has it, and Snakemake run in it."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe.runs.jobs import Jobs


class Project:
    """A working directory: the workflow of the repository, an alignment, a store of its own."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("Snakefile", "workflow", "profiles", "config"):
            (directory / name).symlink_to(root / name)
        self.raw: dict[str, Any] = yaml.safe_load((root / "config" / "config.yaml").read_text())
        self.raw["name"] = "a"
        self.raw["steps"] = {"total": 2, "start": 0, "end": 1}
        self.raw["analysis"] = {"official_table": False}
        for side in ("benchmark", "target"):
            del self.raw[side]["lock"]
        self.write()

    def write(self, path: str = "a.yaml", /, **changes: Any) -> str:
        """Write the alignment with top-level keys changed (sections: their keys)."""
        raw = copy.deepcopy(self.raw)
        for key, value in changes.items():
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
        (self.directory / path).write_text(yaml.safe_dump(raw), encoding="utf-8")
        return path

    def jobs(self, monkeypatch: pytest.MonkeyPatch, config: str = "a.yaml") -> Jobs:
        monkeypatch.chdir(self.directory)
        return Jobs.load(config)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def snakemake(
        self, *words: str, config: str = "a.yaml", profile: str = "profiles/local"
    ) -> subprocess.CompletedProcess[str]:
        """Run the workflow; stdout and stderr together in ``stdout``."""
        return self._command(*_snakemake(config, profile), *words)

    def align(self, config: str = "a.yaml") -> subprocess.CompletedProcess[str]:
        """What ``make align`` does once everything is installed."""
        return self._command("workflow/align", config)

    def start(self, config: str = "a.yaml") -> subprocess.Popen[bytes]:
        """Start the workflow in a process group of its own."""
        return subprocess.Popen(
            _snakemake(config),
            cwd=self.directory,
            env=self.environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=self.directory,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )

    def planned(
        self, *words: str, config: str = "a.yaml", profile: str = "profiles/local"
    ) -> dict[str, int]:
        """Jobs that a dry run would start, by rule."""
        done = self.snakemake("--dry-run", *words, config=config, profile=profile)
        assert done.returncode == 0, done.stdout
        table = re.search(r"^Job stats:\n(.+?)\n\n", done.stdout, re.MULTILINE | re.DOTALL)
        if table is None:
            assert "Nothing to be done" in done.stdout, done.stdout
            return {}
        found = dict(re.findall(r"^(\w+) +(\d+)$", table.group(1), re.MULTILINE))
        return {rule: int(n) for rule, n in found.items() if rule not in ("total", "all")}

    def run(self, *words: str, config: str = "a.yaml") -> str:
        done = self.snakemake(*words, config=config)
        assert done.returncode == 0, done.stdout
        return done.stdout


def _snakemake(config: str, profile: str = "profiles/local") -> list[str]:
    return ["snakemake", "--profile", profile, "--configfile", config]
