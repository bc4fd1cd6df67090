"""The training frameworks rlprobe can run and instrument, one package each.

The only rooms that import a framework. What the host needs of a framework (its command line, the
stages a configuration will run) lives in ``launch`` and ``plan`` modules that import nothing of it,
so that a machine without the framework can schedule and report.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

from rlprobe.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from rlprobe.runs.spec import RunSpec

#: Framework name -> package with ``launch.FRAMEWORK``.
NAMES: tuple[str, ...] = ("verl",)


class Framework(Protocol):
    """What the host side of a run asks of a framework."""

    name: str
    #: Version of the generator of builtin models and data: part of the keys of runs that use them.
    builtin_version: int

    def expected_stages(self, spec: RunSpec) -> tuple[str, ...]:
        """Canonical stages, in order, that a run of ``spec`` executes itself."""

    def command(self, spec: RunSpec, scratch: Path) -> list[str]:
        """The framework's own command line, run inside the image."""

    def environment(self, spec: RunSpec, scratch: Path) -> dict[str, str]:
        """Environment of every process of the run, hooks switched on."""


def get(name: str) -> Framework:
    """The framework called ``name``.

    Raises:
        ConfigError: no such framework; the message lists those accepted.
    """
    if name not in NAMES:
        raise ConfigError(f"framework {name!r} is unknown; accepted: {', '.join(NAMES)}")
    framework: Framework = importlib.import_module(f"{__name__}.{name}.launch").FRAMEWORK
    return framework
