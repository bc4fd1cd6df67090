"""msprobe's own tables of key data: its SingleComparator, a workbook a name.

It pairs arrays by step, rank and micro-step, cuts both to what their shapes have in common, and
knows nothing of samples; what it leaves out is said in the workbook's place.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlprobe import imports
from rlprobe.compare.msprobe import official
from rlprobe.compare.sides import KEY_DATA, Side
from rlprobe.errors import NotComparableError, RlprobeError
from rlprobe.store.objects import linked

_log = logging.getLogger(__name__)

#: In the results of a pair.
DIRECTORY = "official_key_data"


def write(benchmark: Side, target: Side, out: Path, *, every_step: bool) -> list[dict[str, Any]]:
    """Write ``out/official_key_data/{name}.xlsx`` for every name that either side has.

    Args:
        benchmark: msprobe's first side.
        target: its second.
        out: results of the pair.
        every_step: arrays of all steps, not of the first that both sides have alone.

    Returns:
        Of each name how many arrays were compared, and what msprobe complained about.

    Raises:
        NotComparableError: a side has no key data.
        RlprobeError: msprobe is not installed.
    """
    comparator = _msprobe()
    roots = [_data(side) for side in (benchmark, target)]
    steps = None if every_step else _first_step(roots)
    with _laid_out(roots, steps) as sides, tempfile.TemporaryDirectory() as aside:
        arrays = [comparator.get_array_paths(str(side)) for side in sides]
        names = sorted({*arrays[0], *arrays[1]})
        results = [_table(comparator, name, arrays, Path(aside)) for name in names]
        _keep(Path(aside), out / DIRECTORY)
    return results


def _keep(made: Path, place: Path) -> None:
    """Put the workbooks in their place, each whole or not at all, and remove those of before."""
    books = {path.name for path in made.iterdir()}
    for name in sorted(books):
        official.keep(made / name, place / name)
    for stale in place.glob("*.xlsx"):
        if stale.name not in books:
            stale.unlink()


def _msprobe() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()), imports.uncollected():
            from msprobe.core import SingleComparator
    except ImportError as error:
        raise RlprobeError(
            f"official-key-data runs msprobe itself, which cannot be imported here ({error}); "
            "install mindstudio-probe, or run this command in an image that has it. "
            "`rlprobe compare` needs it not"
        ) from error
    return SingleComparator


def _data(side: Side) -> Path:
    found = next((side.path / p for p in KEY_DATA if (side.path / p).is_dir()), None)
    if found is None:
        raise NotComparableError(
            f"{side.path} has no key data: looked for {' and '.join(KEY_DATA)} in it"
        )
    return found


def _steps(root: Path) -> set[int]:
    names = (path.name for path in root.glob("*/step*") if path.is_dir())
    return {int(name[4:]) for name in names if name[4:].isdecimal()}


def _first_step(roots: list[Path]) -> set[int]:
    """The first step that both sides have.

    Raises:
        NotComparableError: there is none.
    """
    steps = [_steps(root) for root in roots]
    shared = steps[0] & steps[1]
    if not shared:
        raise NotComparableError(
            f"no step of key data in common: {roots[0]} has {sorted(steps[0])}, {roots[1]} "
            f"{sorted(steps[1])}"
        )
    return {min(shared)}


@contextlib.contextmanager
def _laid_out(roots: list[Path], steps: set[int] | None) -> Iterator[list[Path]]:
    """The arrays alone, in places whose paths msprobe accepts."""
    with tempfile.TemporaryDirectory(prefix="rlprobe-official-") as aside:
        official.require_path(aside)
        places = []
        for name, root in zip(("benchmark", "target"), roots, strict=True):
            place = Path(aside, name)
            place.mkdir()
            for array in sorted(root.rglob("*.npy")):
                below = array.relative_to(root)
                if steps is None or int(below.parts[1][4:]) in steps:
                    copy = place / below
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    if not linked(array, copy):
                        shutil.copyfile(array, copy)
            places.append(place)
        yield places


def _table(
    comparator: Any, name: str, arrays: list[dict[str, list[Any]]], place: Path
) -> dict[str, Any]:
    keys = [{tuple(found[:4]) for found in side.get(name, [])} for side in arrays]
    shared = keys[0] & keys[1]
    result: dict[str, Any] = {"name": name, "arrays": len(shared), "written": False}
    if not shared:
        lone = [side for side, has in zip(("benchmark", "target"), keys, strict=True) if has]
        where = f"{name} is on the {lone[0]} only" if len(lone) == 1 else (
            f"{name} has no step, rank and micro-step in common"
        )  # fmt: skip
        return result | {"message": official.explain_in(place / f"{name}.xlsx", where)}
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        comparator.compare_single_tag(name, *arrays, str(place))
    complaints = official.complaints(said.getvalue())
    if not (place / f"{name}.xlsx").is_file():
        return result | {"message": official.explain_in(place / f"{name}.xlsx", complaints)}
    if "[ERROR]" in said.getvalue():
        _log.warning("%s: msprobe left arrays out: %s", name, complaints)
        return result | {"written": True, "message": complaints}
    return result | {"written": True, "message": None}
