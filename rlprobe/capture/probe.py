"""Can this environment train on this device? Imports, a tensor, a product and a collective.

    python -m rlprobe.capture.probe --device npu --framework verl --devices 2 --precision bf16

Run where a run would be: inside the image, on the node, with the run's environment. Prints one JSON
line, ``{"checks": [{"name", "ok", "found"}]}``, each failure with the message of what raised it.
Needs what a training process needs and no more; what is missing is an answer here, not an error.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from rlprobe.capture import code

_BACKEND = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Package -> its distribution's name.
_DISTRIBUTIONS = {"msprobe": "mindstudio-probe", "torch_npu": "torch-npu"}
#: A first collective compiles kernels and looks for its peers.
_COLLECTIVE_S = 180
_SIZE = 64

Check = dict[str, Any]


def checks(device: str, framework: str, devices: int, precision: str) -> Iterator[Check]:
    """Every question in turn; those that rest on one that failed are not asked.

    Args:
        device: cpu, cuda or npu.
        framework: verl or slime.
        devices: processes of a run on one node.
        precision: fp32, bf16, fp16 or fp64.
    """
    lacking = False
    packages = ["torch", *(["torch_npu"] if device == "npu" else []), "msprobe", "ray", framework]
    for package in packages:
        found = _asked(f"import {package}", functools.partial(_imported, package))
        lacking = lacking or (package in ("torch", "torch_npu") and not found["ok"])
        yield found
    if lacking:
        return
    found = _asked(f"{device} devices", lambda: _present(device, devices))
    yield found
    if not found["ok"]:
        return
    yield _asked("product", lambda: _product(device, precision))
    yield _asked("collective", lambda: _collective(device, min(devices, 2)))


def _asked(name: str, question: Callable[[], str]) -> Check:
    try:
        return {"name": name, "ok": True, "found": question()}
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, it is the answer
        return {"name": name, "ok": False, "found": _sentence(error)}


def _sentence(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    return (lines[-1] if lines else type(error).__name__)[:400]


def _imported(package: str) -> str:
    checkout = os.environ.get("RLPROBE_SLIME")
    if package == "slime" and checkout and checkout not in sys.path:
        # started from a checkout, which is not installed
        sys.path.insert(0, checkout)
    module = importlib.import_module(package)
    if package == "slime":  # the distribution of that name on the index is another project
        place = next(iter(getattr(module, "__path__", [])), None)
        return (place and code.version_of(Path(place).parent)) or "of no version"
    name = _DISTRIBUTIONS.get(package, package)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "of no version"))


def _space(device: str) -> Any:
    """``torch.cuda``, ``torch.npu``: what both devices answer by the same names."""
    import torch

    return getattr(torch, device)


def _present(device: str, wanted: int) -> str:
    if device == "cpu":
        return f"{os.cpu_count()} cores"
    space = _space(device)
    count = int(space.device_count()) if space.is_available() else 0
    if count < wanted:
        raise RuntimeError(f"torch.{device} sees {count} of the {wanted} devices that a run needs")
    return f"{count} ({space.get_device_name(0)})"


def _product(device: str, precision: str) -> str:
    """A product whose every element is known: ones times ones."""
    import torch

    dtype = getattr(torch, _DTYPES[precision])
    ones = torch.ones((_SIZE, _SIZE), dtype=dtype, device=device)
    found = (ones @ ones).to("cpu", torch.float64)
    if not bool((found == float(_SIZE)).all()):
        raise RuntimeError(f"ones times ones in {precision} is {found[0, 0]}, not {_SIZE}")
    return f"{_SIZE}x{_SIZE} in {precision} is right"


def _collective(device: str, world: int) -> str:
    """An all-reduce between processes of one device each, in this interpreter's children."""
    with tempfile.TemporaryDirectory() as directory:
        words = [sys.executable, "-m", "rlprobe.capture.probe", "--device", device]
        words += ["--rendezvous", str(Path(directory, "store")), "--world", str(world)]
        ranks = [
            subprocess.Popen(
                [*words, "--rank", str(rank)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            said = [rank.communicate(timeout=_COLLECTIVE_S)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"all-reduce over {world} processes ({_BACKEND[device]}) took more than "
                f"{_COLLECTIVE_S} s"
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
    for number, (rank, text) in enumerate(zip(ranks, said, strict=True)):
        if rank.returncode:
            last = (text.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"rank {number} of {world} ({_BACKEND[device]}): {last}")
    several = "es" * (world > 1)
    return f"all-reduce over {world} process{several} by {_BACKEND[device]} is right"


def rank_of_collective(device: str, rendezvous: str, rank: int, world: int) -> None:
    """One process of :func:`_collective`.

    Raises:
        RuntimeError: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    place = device
    if device != "cpu":
        if device == "npu":
            importlib.import_module("torch_npu")
        place = f"{device}:{rank}"
        _space(device).set_device(rank)
    dist.init_process_group(
        _BACKEND[device], init_method=f"file://{rendezvous}", rank=rank, world_size=world
    )
    value = torch.full((8,), float(rank + 1), device=place)
    dist.all_reduce(value)
    wanted = world * (world + 1) / 2
    found = value.cpu()
    dist.destroy_process_group()
    if not bool((found == wanted).all()):
        raise RuntimeError(f"the sum over {world} ranks is {found[0]}, not {wanted}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlprobe.capture.probe")
    parser.add_argument("--device", choices=tuple(_BACKEND), required=True)
    parser.add_argument("--framework", choices=("verl", "slime"), default="verl")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", choices=tuple(_DTYPES), default="fp32")
    parser.add_argument("--rendezvous")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.rendezvous is not None:
        rank_of_collective(given.device, given.rendezvous, given.rank, given.world)
        return 0
    found = list(checks(given.device, given.framework, given.devices, given.precision))
    print(json.dumps({"checks": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
