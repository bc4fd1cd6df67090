"""The faults and benign changes of a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlprobe.errors import ConfigError, UsageError
from rlprobe.faults.declare import Declaration
from rlprobe.faults.plant import load_file
from rlprobe.selftest import alignments

_HERE = Path(__file__).parent
#: The project's own.
OWN: tuple[Path, ...] = (_HERE / "faults", _HERE / "benign")


@dataclass(frozen=True)
class Case:
    """One fault or benign change and where it is written down."""

    declared: Declaration
    file: Path

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def reference(self) -> str:
        """``FILE:NAME``."""
        return f"{self.file}:{self.name}"


def cases(directories: Sequence[Path] = OWN, only: Sequence[str] = ()) -> list[Case]:
    """Every case of the directories' Python files, faults first, by file and name.

    Args:
        directories: searched recursively; files whose name begins with ``_`` are left out.
        only: names to keep, all when empty.

    Raises:
        ConfigError: a directory does not exist, a file fails on import, a case needs what no
            alignment has, or a name is given twice.
        UsageError: ``only`` names something that is not there, or nothing is left.
    """
    found: dict[str, Case] = {}
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory of faults")
        for file in sorted(directory.rglob("*.py")):
            if file.name.startswith("_"):
                continue
            for name, (_, declared) in sorted(load_file(file).items()):
                if name in found:
                    raise ConfigError(
                        f"{name} is declared in {found[name].file} and in {file}; names are unique"
                    )
                try:
                    alignments.check(declared.needs)
                except ConfigError as error:
                    raise ConfigError(f"fault file {file}: {name}: {error}") from error
                found[name] = Case(declared, file.resolve())
    missing = [name for name in only if name not in found]
    if missing:
        raise UsageError(
            f"no fault or benign change is called {missing[0]!r}; there are: "
            f"{', '.join(sorted(found)) or 'none'}"
        )
    chosen = [case for name, case in found.items() if not only or name in only]
    if not chosen:
        places = ", ".join(map(str, directories))
        raise UsageError(f"no file in {places} declares a fault or a benign change")
    return sorted(chosen, key=lambda case: case.declared.is_benign)


#: Stages that the quick subset takes a fault of, as far as there are any.
_QUICK = ("actor_compute_log_prob", "critic_update", "actor_update")


def quick(found: Sequence[Case]) -> list[Case]:
    """A few of them that share one collected run: a fault of three stages, one benign change."""
    plain = [case for case in found if not case.declared.needs]
    chosen = [
        next((case for case in plain if case.declared.stage == stage), None) for stage in _QUICK
    ]
    chosen.append(next((case for case in plain if case.declared.is_benign), None))
    return [case for case in chosen if case is not None] or list(found[:1])
