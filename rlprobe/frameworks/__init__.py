"""The training frameworks rlprobe can run and instrument, one package each.

The only rooms that import a framework. What the host needs of a framework (its command line, the
stages a configuration will run) lives in ``launch`` and ``plan`` modules that import nothing of it,
so that a machine without the framework can schedule and report.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlprobe.errors import ConfigError
from rlprobe.frameworks.adopted import Adopted, Training
from rlprobe.frameworks.layout import Layout
from rlprobe.said import Said
from rlprobe.spec import RunSpec

#: Framework name -> module with ``FRAMEWORK``.
_LAUNCH = {"verl": "verl.host.launch", "slime": "slime.launch"}
NAMES: tuple[str, ...] = tuple(_LAUNCH)


@dataclass(frozen=True)
class RunDirectories:
    """Where a run may write; absolute, and seen by every node of the run."""

    #: This run's alone; gone once the run is committed.
    scratch: Path
    #: Builtin models and data, shared by every run of the store.
    assets: Path

    @property
    def side(self) -> Path:
        """Output that is not in the contract's tree."""
        return self.scratch / "side"


class Framework(Protocol):
    """What the host side of a run asks of a framework."""

    @property
    def name(self) -> str:
        """As an alignment's ``framework`` spells it."""

    @property
    def builtin_version(self) -> int:
        """Version of the generators of builtin models and data; part of a run's identity."""

    @property
    def builtins(self) -> Mapping[str, Collection[str]]:
        """Names of what is builtin as a ``model`` and as ``data``, without ``builtin:``."""

    def check(self, spec: RunSpec) -> None:
        """Refuse what this framework cannot do of a run.

        Raises:
            ConfigError: says which key asks for it, and what is accepted.
        """

    def checkpoint_step(self, path: str) -> int:
        """The step after which a checkpoint of the framework's own was made.

        Raises:
            ConfigError: the directory's name does not say it, or runs cannot begin from one.
        """

    def expected_stages(self, spec: RunSpec) -> tuple[str, ...]:
        """Canonical stages, in order, that a run of ``spec`` executes itself."""

    def inference_not_recorded(self, spec: RunSpec) -> str | None:
        """Why ``capture.token_range`` records nothing in the benchmark; None where it does, or
        asks for nothing.

        Raises:
            ConfigError: the alignment itself asks for what cannot be recorded.
        """

    def layout(self, spec: RunSpec) -> Layout:
        """How the run spreads its actor over processes."""

    def prepare(self, spec: RunSpec, directories: RunDirectories) -> list[list[str]]:
        """Commands to run before the framework's, in the same image."""

    def command(self, spec: RunSpec, directories: RunDirectories) -> list[str]:
        """The framework's own command line, run inside the image."""

    def environment(self, spec: RunSpec, directories: RunDirectories) -> dict[str, str]:
        """Environment of every process of the run, hooks switched on."""

    def installed(self, environment: Mapping[str, str]) -> str | None:
        """Its version in this interpreter's environment; None where it is not there.

        Args:
            environment: variables of the side's processes, which may name a checkout.
        """

    def same_version(self, declared: str, found: str) -> bool:
        """Whether what is installed is what an alignment declares."""

    def known_differences(self, one: str, other: str) -> list[Said]:
        """What two of its versions compute otherwise by themselves: sentences, for a verdict."""

    def adopt(self, training: Training) -> Adopted:
        """A command line of a user's own as an alignment.

        Raises:
            UsageError: it cannot be one.
        """

    def options(self, words: Sequence[str]) -> dict[str, str]:
        """The options among a command's words, with their values."""


def not_recorded(spec: RunSpec, engine: str, instead: str) -> str | None:
    """What to say where an engine's inference layers are not recorded by an alignment.

    Args:
        spec: the benchmark's run.
        engine: what generates.
        instead: what records its layers.

    Raises:
        ConfigError: the alignment gives a ``token_range`` of its own: the default asks for nothing
            that anybody would miss, a given one does.
    """
    if spec.capture.token_range is None:
        return None
    said = f"an alignment records no layers of {engine}; {instead}"
    if "token_range" in spec.capture.model_fields_set:
        found = list(spec.capture.token_range)
        raise ConfigError(f"capture.token_range: found {found}, but {said}; accepted here: null")
    return f"capture.token_range: {said}"


def on_loopback(spec: RunSpec) -> dict[str, str]:
    """Variables of a CPU's run on one node, which talks to nobody else; several nodes find out
    theirs."""
    if spec.resources.nodes > 1:
        return {}
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        # Ray rewrites a loopback address to one that never answers unless told not to
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def get(name: str) -> Framework:
    """The framework called ``name``.

    Raises:
        ConfigError: no such framework; the message lists those accepted.
    """
    if name not in NAMES:
        raise ConfigError(f"framework {name!r} is unknown; accepted: {', '.join(NAMES)}")
    framework: Framework = importlib.import_module(f"{__name__}.{_LAUNCH[name]}").FRAMEWORK
    return framework
