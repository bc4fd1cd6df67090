"""What a run's inputs are, independent of where they lie: the digests its key is made of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlprobe import files, frameworks
from rlprobe.config import (
    BUILTIN,
    Alignment,
    ContainerSection,
    DataSection,
    DeviceSection,
    EntryPointSection,
    ModelSection,
)
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ConfigError, ReplayError
from rlprobe.runs import containers, nodelocal, toplevel
from rlprobe.store import keys

#: The head of an image file that is hashed: it holds the identifier and the table of contents that
#: every build of a SIF writes anew, so that images of many GB need not be read whole.
_IMAGE_HEAD = 1 << 20
_WITH_THEIR_DIRECTORY = ("data.reward_function", "target.fault", "entry_point.script")
_REPLAYED = (
    "accepted: what verl's skip.rollout saved, step{N}.h5 files, or a dump_path with key data"
)


def require(
    alignment: Alignment, fault: str | None, environ: Mapping[str, str] = os.environ
) -> None:
    """Make sure that everything an alignment names is on this machine.

    Args:
        alignment: the validated file.
        fault: what is planted in the target.
        environ: where the base of the jobs' own directories is looked up.

    Raises:
        ConfigError: names everything that is not there, or that no job can use, at once.
    """
    framework, lost = alignment.framework, []
    for key, path in _named(alignment, fault):
        try:
            if path.startswith(BUILTIN):
                _builtin(path, key, framework)
            else:
                _existing(path, key)
        except ConfigError as error:
            lost.append(str(error))
    for key, place in (("store", alignment.store), ("results", alignment.results)):
        lost.extend(_no_directory(key, Path(place)))
    lost.extend(_not_bindable(alignment, fault))
    contained = all(side.container.runtime != "none" for side in _sides(alignment))
    try:
        nodelocal.require(environ, contained=contained)
    except ConfigError as error:
        lost.append(str(error))
    if len(lost) == 1:
        raise ConfigError(lost[0])
    if lost:
        raise ConfigError("\n".join([f"{len(lost)} problems", *(f"  {line}" for line in lost)]))


def analysis_not_here(alignment: Alignment) -> list[str]:
    """Images of the comparisons that this machine lacks.

    Nobody's mistake where the machine only trains: a site that makes one side, a node of a cluster.
    """
    analysis = alignment.analysis
    if analysis.runtime != "apptainer":
        return []
    images = (("image", analysis.image), ("torch_image", analysis.torch_image))
    return [
        f"analysis.{key}: {image} does not exist (looked in {Path.cwd()}); the jobs that compare "
        "enter it"
        for key, image in images
        if image is not None and "://" not in image and not Path(image).expanduser().exists()
    ]


def _no_directory(key: str, place: Path) -> Iterator[str]:
    """What stands where a directory is, or is to be made."""
    for path in (place, *place.parents):
        if path.exists() or path.is_symlink():
            if not path.is_dir():
                yield f"{key}: {path} is no directory; accepted: a directory, or a path to make one"
            return


def _sides(alignment: Alignment) -> list[DeviceSection]:
    """What is run: a benchmark that another site made is not."""
    return [alignment.target, *([alignment.benchmark] if alignment.benchmark.run is None else [])]


def _not_bindable(alignment: Alignment, fault: str | None) -> Iterator[str]:
    """What a container is to be given and no runtime can bind: said before a job waits for it."""
    contained = any(side.container.runtime != "none" for side in _sides(alignment))
    compared = alignment.analysis.image is not None or alignment.analysis.torch_image is not None
    if not (contained or compared):
        return
    places = [("the working directory", "."), ("store", alignment.store)]
    if compared:
        places.append(("results", alignment.results))
    if contained:
        # an image is opened by the host, and a lock read by it
        given = _named(alignment, fault)
        places += [(key, path) for key, path in given if not key.endswith((".image", ".lock"))]
        entry = alignment.entry_point
        for key in ("script", "config_path"):
            path = None if entry is None else getattr(entry, key)
            if path is not None:
                places.append((f"entry_point.{key}", path))
    for key, path in places:
        whole = Path(path).expanduser().absolute()
        # of a file of Python the directory is bound, for what stands beside it
        whole = whole.parent if key in _WITH_THEIR_DIRECTORY else whole
        if not path.startswith(BUILTIN) and not containers.bindable(whole):
            yield (
                f"{key}: {whole} cannot be bound into a container, which this alignment has; "
                "accepted: a path without ',' and ':'"
            )


def _named(alignment: Alignment, fault: str | None) -> Iterator[tuple[str, str]]:
    """Keys of an alignment that name files and directories, with what they name."""
    for role, path in alignment.model.paths().items():
        yield f"model.{'path' if role == 'actor' else role + '_path'}", path
    yield from (("data.train_files", path) for path in alignment.data.train_files)
    yield from (("data.val_files", path) for path in alignment.data.val_files or ())
    for key, reference in (
        ("data.reward_function", alignment.data.reward_function), ("target.fault", fault)
    ):  # fmt: skip
        if reference is not None and ":" in reference:
            yield key, reference.rpartition(":")[0]
    if alignment.resume_from is not None:
        yield "resume_from", alignment.resume_from
    if alignment.benchmark.rollouts is not None:
        yield "benchmark.rollouts", alignment.benchmark.rollouts
    for where, side in (("benchmark", alignment.benchmark), ("target", alignment.target)):
        if where == "benchmark" and alignment.benchmark.run is not None:
            continue  # made at another site
        if side.container.image is None and side.lock is not None:
            yield f"{where}.lock", side.lock
        image = side.container.image
        if image is not None and side.container.runtime == "apptainer" and "://" not in image:
            yield f"{where}.container.image", image


def model(section: ModelSection, framework: str) -> dict[str, str]:
    """Identity of each given model by role.

    Raises:
        ConfigError: a model directory does not exist or holds no model, or no such builtin.
    """
    return {
        role: _model(path, f"model.{'path' if role == 'actor' else role + '_path'}", framework)
        for role, path in section.paths().items()
    }


def data(section: DataSection, framework: str) -> dict[str, str | None]:
    """Digest of the training prompts, the validation prompts and the reward function.

    Raises:
        ConfigError: a file does not exist, or no such builtin.
    """
    return {
        "train": _files(section.train_files, "data.train_files", framework),
        "val": None
        if section.val_files is None
        else _files(section.val_files, "data.val_files", framework),
        "reward_function": None
        if section.reward_function is None
        else function(section.reward_function, "data.reward_function"),
    }


def checkpoint(path: str, framework: str) -> str:
    """Identity of a checkpoint: the step it was made after, and what its files are.

    Raises:
        ConfigError: there is no such directory, or its name does not say the step.
    """
    directory = _existing(path, "resume_from")
    step = frameworks.get(framework).checkpoint_step(str(directory))
    return f"{step}:{keys.model_id(directory)}"


def rollouts(path: str) -> str:
    """Digest of saved rollouts: names below the directory, and contents.

    Raises:
        ConfigError: there is no such directory, or nothing in it that a run can replay.
    """
    directory = _existing(path, "benchmark.rollouts")
    below = sorted(p for p in directory.rglob("*") if p.is_file()) if directory.is_dir() else []
    if not below:
        raise ConfigError(
            f"benchmark.rollouts: {directory} is no directory with files; {_REPLAYED}"
        )
    _require_replayable(directory)
    total = hashlib.sha256()
    for found in below:
        name = found.relative_to(directory).as_posix()
        total.update(f"{name}\0{files.digest(found).sha256}\n".encode())
    return f"sha256:{total.hexdigest()}"


def _require_replayable(directory: Path) -> None:
    """What a run would refuse once its framework has started is refused before."""
    from rlprobe.dumps.rollouts import recorded
    from rlprobe.rollouts import hdf5

    ours = (directory, directory / "rollouts")
    if (directory / "data").is_dir() or any(p.is_dir() and hdf5.steps(p) for p in ours):
        return
    try:
        there = recorded.found(directory)
    except ReplayError as error:
        raise ConfigError(f"benchmark.rollouts: {error}") from error
    if there is None:
        raise ConfigError(f"benchmark.rollouts: {directory} holds no rollouts; {_REPLAYED}")


def function(reference: str, key: str) -> str:
    """Identity of ``FILE.py:NAME``: the file's digest and the name.

    Args:
        reference: the file, relative to the working directory, and the name in it.
        key: where the reference was given, for messages.

    Raises:
        ConfigError: the reference is not of that form, or the file does not exist, is no Python
            or has no such name.
    """
    path, separator, name = reference.rpartition(":")
    if not separator or not name.isidentifier():
        raise ConfigError(f"{key}: found {reference!r}; accepted: FILE.py:NAME")
    file = _existing(path, key)
    try:
        known = toplevel.names(file)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if known is not None and name not in known.bound:
        raise ConfigError(
            f"{key}: {file} has no {name}; it has: {', '.join(sorted(known.bound)) or 'nothing'}"
        )
    if known is not None and name in known.literals:
        raise ConfigError(f"{key}: {name} of {file} is no function")
    return f"{_digest(file)}:{name}"


def fault(reference: str, key: str) -> str:
    """Identity of a planted fault, ``FILE.py:NAME``.

    Raises:
        ConfigError: as :func:`function`, or nothing can have declared the name a fault.
    """
    found = function(reference, key)
    path, _, name = reference.rpartition(":")
    known = toplevel.names(_existing(path, key))
    if known is not None and name in known.plain:
        raise ConfigError(
            f"{key}: {name} of {path} is declared neither a fault nor a benign change; write "
            "@fault(stage=…, module=…, cause=…) or @benign() above it; under a decorator are: "
            + (", ".join(sorted(known.decorated)) or "none")
        )
    return found


def entry_point(section: EntryPointSection | None) -> dict[str, str | None] | None:
    """Identity of an entry point of the user's own: names, and the content of its files.

    Raises:
        ConfigError: the script, or the directory of its configuration, does not exist.
    """
    if section is None:
        return None
    found: dict[str, str | None] = {"module": section.module, "config_name": section.config_name}
    if section.script is not None:
        found["script"] = _digest(_existing(section.script, "entry_point.script"))
    if section.config_path is not None:
        directory = _existing(section.config_path, "entry_point.config_path")
        configurations = sorted(directory.rglob("*.yaml"))
        if not configurations:
            raise ConfigError(
                f"entry_point.config_path: {directory} holds no YAML file; accepted: the directory "
                "of a Hydra configuration"
            )
        found["config_path"] = keys.data_digest(configurations)
    return found


def environment(container: ContainerSection, lock: str | None, key: str) -> str | None:
    """Identity of the software a run uses: its image, or the lock its environment comes from.

    Raises:
        ConfigError: the lock, or an image given as a file, does not exist.
    """
    if container.image is not None:
        is_file = container.runtime == "apptainer" and "://" not in container.image
        if not is_file:
            return container.image
        path = _existing(container.image, f"{key}.container.image")
        with path.open("rb") as stream:
            head = hashlib.sha256(stream.read(_IMAGE_HEAD))
        head.update(path.stat().st_size.to_bytes(8, "little"))
        return f"image:{head.hexdigest()}"
    return None if lock is None else f"lock:{_digest(_existing(lock, f'{key}.lock'))}"


def _model(path: str, key: str, framework: str) -> str:
    if path.startswith(BUILTIN):
        return _builtin(path, key, framework)
    directory = _existing(path, key)
    # a reference may be a framework's own checkpoint; the actor's directory has the tokenizer too
    if key == "model.path" and not (directory / "config.json").is_file():
        raise ConfigError(
            f"{key}: {path} holds no config.json; accepted: a model directory in Hugging Face "
            f"layout, or {BUILTIN}NAME"
        )
    return keys.model_id(directory)


def model_config(path: str) -> Mapping[str, Any]:
    """What a model directory's config.json says of its shape; empty of a builtin.

    Raises:
        ConfigError: it cannot be read.
    """
    file = Path(path).expanduser() / "config.json"
    if path.startswith(BUILTIN) or not file.is_file():
        return {}
    try:
        found = jsonfile.mapping(jsonfile.load(file))
        return jsonfile.mapping(found.get("text_config", found))
    except DocumentError as error:
        raise ConfigError(f"model.path: {file}: {error}") from error


def _builtin(name: str, key: str, framework: str) -> str:
    """Made by a generator: the name and the generator's version say what it is."""
    accepted = frameworks.get(framework).builtins.get(key.partition(".")[0], ())
    if name.removeprefix(BUILTIN) not in accepted:
        known = ", ".join(f"{BUILTIN}{each}" for each in sorted(accepted))
        raise ConfigError(
            f"{key}: {name} is no builtin {key.partition('.')[0]} of {framework}; accepted: "
            + (f"{known}, or a path" if known else "a path, as it has none")
        )
    return f"{name}@{frameworks.get(framework).builtin_version}"


def _files(paths: Iterable[str], key: str, framework: str) -> str:
    paths = tuple(paths)
    builtin = [_builtin(path, key, framework) for path in paths if path.startswith(BUILTIN)]
    if builtin:
        if len(paths) > 1:
            raise ConfigError(f"{key}: found {len(paths)} entries; accepted: builtin data alone")
        return builtin[0]
    return keys.data_digest([_existing(path, key) for path in paths])


def _existing(path: str, key: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        builtin = (
            f", or {BUILTIN}NAME" if key.startswith(("model.", "data.train", "data.val")) else ""
        )
        raise ConfigError(
            f"{key}: {path} does not exist (looked in {Path.cwd()}); accepted: a path that this "
            f"machine can read{builtin}"
        )
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return files.sha256(stream).hex()
