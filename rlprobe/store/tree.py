"""A run's dump as plain files, for msprobe and other tools by hand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rlprobe.errors import StoreError
from rlprobe.store import locks, packing
from rlprobe.store.ingest import TENSORS
from rlprobe.store.objects import linked
from rlprobe.store.read import Run, require_outside

#: A key's file of one micro-batch, in the store's tree.
_KEY_DATA = re.compile(r"(data/(?P<key>[^/]+)/step\d+/rank\d+/micro_step\d+)/(?P=key)\.(npy|json)")


def lay_out(run: Run, target: Path, *, copy: bool = False, guide: bool = False) -> int:
    """Write a run's dump to ``target`` as ``{stage}/step{N}/rank{R}/…`` and ``data/…``.

    Args:
        run: the run.
        target: a directory that does not exist yet, or is empty.
        copy: copy every file; by default files are hard links into the store, and read-only.
        guide: key data under the names of the vendor's guide, ``responses/…/response0.npy``.

    Returns:
        The number of files.

    Raises:
        StoreError: the target has something in it or lies in the store, or a file of the run is
            missing or damaged.
    """
    require_outside(run.store, target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreError(f"{target} exists and is not an empty directory; choose another place")
    # Built aside, so that an interrupted call leaves nothing that looks complete.
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    with locks.shared(run.store):
        aside.mkdir(parents=True)
        try:
            count = sum(
                _place(run.path / file.path, aside / _name(file.path, guide), copy)
                for file in run.manifest.files
                if file.path.startswith("dump/")
            )
            aside.rename(target)
        except FileExistsError as error:
            shutil.rmtree(aside)
            raise StoreError(f"run {run.key[:12]} has {error.filename} twice") from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return count


def _name(path: str, guide: bool) -> str:
    name = path.removeprefix("dump/")
    found = _KEY_DATA.fullmatch(name) if guide else None
    if found is None:
        return name
    return f"{found[1]}/{found['key'].removesuffix('s')}0.{found[3]}"


def _place(source: Path, destination: Path, copy: bool) -> int:
    if not source.is_file():
        raise StoreError(f"{source} is missing; run `rlprobe store verify`")
    if source.name == TENSORS + packing.SUFFIX:
        directory = destination.with_suffix("")
        directory.mkdir(parents=True, exist_ok=True)
        count = 0
        for name, content in packing.unpack(source):
            # Never over a file that is there: it may be a link into the store.
            with (directory / name).open("xb") as file:
                file.write(content)
            count += 1
        return count
    destination.parent.mkdir(parents=True, exist_ok=True)
    if copy or not linked(source, destination):
        shutil.copyfile(source, destination)
    return 1
