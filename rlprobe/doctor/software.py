"""Are images and programs there, and do they hold the versions the alignment declares?"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rlprobe import frameworks
from rlprobe.config import Alignment, ContainerSection, DeviceSection
from rlprobe.doctor.item import Item, fail, ok, skip, warn

#: Distribution on the index -> name of the label that our images carry.
_MSPROBE = "mindstudio-probe"
_LABEL = "org.rlprobe."
_TIMEOUT_S = 120


def look(alignment: Alignment, parts: Collection[str]) -> Iterator[Item]:
    """Items about the software of the parts that are made here: benchmark, target, analysis."""
    sides: dict[str, DeviceSection] = {
        "benchmark": alignment.benchmark, "target": alignment.target
    }  # fmt: skip
    failed: dict[str, str] = {}  # what was said of an image -> the first item that says it
    for key, side in sides.items():
        if key not in parts:
            continue
        for item in _side(alignment, key, side):
            yield _once(item, side.container, failed)
    if "analysis" not in parts:
        return
    for key in ("image", "torch_image"):
        image = getattr(alignment.analysis, key)
        if image is not None and ("://" not in image or alignment.analysis.runtime != "apptainer"):
            container = ContainerSection(runtime=alignment.analysis.runtime, image=image)
            yield _once(_exists(f"analysis.{key}", container)[0], container, failed)


def _once(item: Item, container: ContainerSection, failed: dict[str, str]) -> Item:
    """The item; where the same was said of the same image, with the place for what to do."""
    if item.state != "fail" or container.runtime == "none":
        return item
    told = f"{container.runtime} {container.image}: {item.found}"
    first = failed.setdefault(told, item.name)
    return item if first == item.name else replace(item, action=f"as for {first}: one image")


def _side(alignment: Alignment, key: str, side: DeviceSection) -> Iterator[Item]:
    name = f"{key}.container.image"
    if side.container.runtime == "none":
        versions: dict[str, str] | None = _installed(alignment.framework, side.environment)
        name = f"{key} environment"
    else:
        item, versions = _exists(name, side.container)
        yield item
        if item.state in ("fail", "skip"):
            return
    if not versions:
        yield warn(
            name,
            "carries no labels of rlprobe",
            "build it from containers/, or trust its tag; versions are checked when it starts",
        )
        return
    yield _version(name, alignment.framework, alignment.version(side), versions)
    if _MSPROBE not in versions:
        yield fail(name, "msprobe is not in it", f"install {_MSPROBE} (the wheelhouse has it)")
    else:
        yield ok(name, f"msprobe {versions[_MSPROBE]}")


def _version(name: str, framework: str, wanted: str, versions: dict[str, str]) -> Item:
    found = versions.get(framework)
    if found is None:
        return fail(name, f"{framework} is not in it", _MISSING[framework].format(wanted=wanted))
    if not frameworks.get(framework).same_version(wanted, found):
        return fail(
            name,
            f"{framework} is {found}, framework_version says {wanted}",
            "correct framework_version, or use the image of that version",
        )
    if not any(character.isdigit() for character in found):
        said = f"{framework} {found}: framework_version {wanted} is not checked"
        return warn(name, said, "give this side a checkout whose setup.py says its version")
    return ok(name, f"{framework} {found}")


#: What to do where a side's environment lacks its framework.
_MISSING = {
    "verl": "install verl=={wanted}",
    "slime": "name a checkout of slime {wanted} by RLPROBE_SLIME in the side's environment",
}


def _installed(framework: str, environment: Mapping[str, str]) -> dict[str, str]:
    found = {}
    version = frameworks.get(framework).installed(environment)
    if version is not None:
        found[framework] = version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found[_MSPROBE] = importlib.metadata.version(_MSPROBE)
    # Something else may be missing, but this interpreter was looked into.
    return found or {"python": ""}


#: An item about an image, and the versions its labels tell; None where they are unknown.
_Seen = tuple[Item, dict[str, str] | None]


def _exists(name: str, container: ContainerSection) -> _Seen:
    image = str(container.image)
    look = _RUNTIMES.get(container.runtime)
    if look is None or (container.runtime == "apptainer" and "://" in image):
        return ok(name, f"{image} is fetched when a job starts"), None
    return look(name, image)


def _apptainer(name: str, image: str) -> _Seen:
    if not Path(image).expanduser().exists():
        recipe = Path("containers", f"{Path(image).stem}.def")
        named = recipe if recipe.is_file() else "containers/NAME.def"
        action = f"apptainer build {image} {named} (docs/cluster.md)"
        return fail(name, f"{image} does not exist", action), None
    if not shutil.which("apptainer"):
        return skip(name, f"{image} exists; apptainer is not on this machine's PATH"), None
    shown = _ask("apptainer", "inspect", "--json", "--labels", image)
    if shown is None:
        return fail(name, f"{image} is not an image apptainer can read", "build it anew"), None
    labels = json.loads(shown)["data"]["attributes"]["labels"]
    return ok(name, f"{image} exists"), _versions(labels)


def _docker(name: str, image: str) -> _Seen:
    if not shutil.which("docker"):
        return skip(name, "docker is not on this machine's PATH", "use --on-cluster"), None
    shown = _ask("docker", "image", "inspect", "--format", "{{json .Config.Labels}}", image)
    if shown is None and _ask("docker", "version", "--format", "{{.Server.Version}}") is None:
        return fail(
            name,
            "docker's daemon does not answer on this machine",
            "start it (systemctl start docker), or have your user join the group that may use it",
        ), None
    if shown is None:
        return fail(name, f"docker has no {image} here", f"docker pull {image}"), None
    return ok(name, f"{image} is here"), _versions(json.loads(shown) or {})


def _pyxis(name: str, image: str) -> _Seen:
    helped = _ask("srun", "--help") if shutil.which("srun") else None
    if helped is None or "--container-image" not in helped:
        action = "ask the site for pyxis, or use another runtime"
        return fail(name, "srun knows no --container-image", action), None
    return ok(name, f"srun has pyxis; {image} is fetched when a job starts"), None


_RUNTIMES: dict[str, Callable[[str, str], _Seen]] = {
    "apptainer": _apptainer,
    "docker": _docker,
    "pyxis": _pyxis,
}


def _versions(labels: dict[str, str]) -> dict[str, str]:
    return {
        key.removeprefix(_LABEL): value for key, value in labels.items() if key.startswith(_LABEL)
    }


def _ask(*command: str) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    return done.stdout if done.returncode == 0 else None
