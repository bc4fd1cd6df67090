"""Run a suspect's operators again: plain torch, nothing else.

    python reproduce.py --device cpu|cuda|npu

Beside this file lie, of the benchmark and of the target, the operators that ran (``*.json``) and
the tensors they were given and made (``*.safetensors``, unless they were left out: random numbers
of the same shapes and sizes then stand in). Each side's operators run on the device and, on the
CPU, in fp64. Exit code 3 while the target's differ from the benchmark's by more than the tolerance,
0 where they agree, 1 where they could not be run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
Values = dict[int, torch.Tensor]
#: Namespaces of operators in which processes exchange numbers.
_COLLECTIVES = ("c10d::", "_c10d_functional::")

#: Views of rows of several lengths, and questions about them.
_NESTED = ("aten::_nested_", "aten::values", "prim::layout")


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; none where there is no file."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        dtype = _DTYPES[entry["dtype"]]
        raw = bytearray(data[begin:end])
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(entry["shape"])
    return found


def stand_in(value: dict[str, Any]) -> torch.Tensor:
    """Random numbers like a tensor's: its dtype, shape and norm, or its range."""
    dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    generator = torch.Generator().manual_seed(value["value"])
    shape = value["shape"]
    if not dtype.is_floating_point:
        low, high = int(float(value.get("min") or 0)), int(float(value.get("max") or 1))
        return torch.randint(low, high + 1, shape, generator=generator).to(dtype)
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    norm = value.get("norm")
    if norm is not None and made.numel():
        made = made * (norm / float(made.norm().clamp_min(1e-300)))
    return made.to(dtype)


def _values(operator: dict[str, Any]) -> list[dict[str, Any]]:
    """What an operator was given."""
    return [value for argument in operator["arguments"] for value in argument["tensors"]]


class Replay:
    """One side's operators.

    Args:
        trace: ``{operators, results}``.
        tensors: what they were given, by name.
        device: where they run.
        wide: in fp64.
    """

    def __init__(
        self, trace: dict[str, Any], tensors: dict[str, torch.Tensor], device: str, wide: bool
    ) -> None:
        self._trace = trace
        self._tensors = tensors
        self._device = device
        self._wide = wide
        self._values: Values = {}
        #: What was given from outside, as it was: operators in place change it.
        self._given: Values = {}

    def run(self) -> list[torch.Tensor]:
        """The results, on the CPU."""
        for operator in self._trace["operators"]:
            self._run(operator)
        found = []
        for number in self._trace["results"]:
            made = self._values[number].detach()
            if self._trace.get("changes"):
                made = made - self._given[number]
            found.append(made.cpu())
        return found

    def _run(self, operator: dict[str, Any]) -> None:
        if operator["name"].startswith("module::"):
            for value in operator["outputs"]:  # a module within: what it made is given
                self._get(value)
            return
        if operator["name"].startswith(_NESTED):
            for value in operator["outputs"]:  # rows of several lengths are traced as their values
                self._get(value)
            return
        if operator["name"] == "aten::unbind.int" and self._of_rows(operator):
            return
        if operator["name"].startswith(_COLLECTIVES):
            self._received(operator)
            return
        drawn = [self._tensors.get(f"drawn{operator['n']}.{i}")
                 for i in range(len(operator["outputs"]))]  # fmt: skip
        if drawn and all(t is not None for t in drawn):  # random numbers are those of the run
            self._draw(operator, [t for t in drawn if t is not None])
            return
        space, _, name = operator["name"].partition("::")
        name, _, overload = name.partition(".")
        function = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        given = {argument["name"]: argument for argument in operator["arguments"]}
        args, kwargs = [], {}
        for argument in function._schema.arguments:
            if argument.name not in given:
                continue
            value = self._argument(given[argument.name], str(argument.type), argument.name)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        made = function(*args, **kwargs)
        flat = list(made) if isinstance(made, (list, tuple)) else [made]
        flat = [t for item in flat for t in (item if isinstance(item, (list, tuple)) else [item])]
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        for value, tensor in zip(operator["outputs"], tensors, strict=False):
            self._values[value["value"]] = tensor

    def _of_rows(self, operator: dict[str, Any]) -> bool:
        """Take rows of several lengths apart; False of a plain tensor, which loses a dimension."""
        whole, rows = _values(operator)[0], operator["outputs"]
        if not rows or len(rows[0]["shape"]) != len(whole["shape"]):
            return False
        parts = self._get(whole).split([row["shape"][0] for row in rows])
        self._values.update({row["value"]: part for row, part in zip(rows, parts, strict=True)})
        return True

    def _received(self, operator: dict[str, Any]) -> None:
        """What a collective left: as the next operator was given it, with no other process here."""
        sent = {v["digest"]: v for v in _values(operator) if v["digest"] is not None}
        for tensor in operator["outputs"]:
            number = tensor["value"]
            used = self._next_use(operator["n"], number)
            if used is None:
                continue
            unchanged = sent.get(used["digest"])
            if unchanged is not None:  # of one process, or of equal numbers
                found = self._get(unchanged).clone()
            elif len(used["elements"] or ()) == math.prod(used["shape"]):
                dtype = getattr(torch, used["dtype"].removeprefix("torch."))
                numbers = [float(e) if isinstance(e, str) else e for e in used["elements"]]
                found = torch.tensor(numbers, dtype=dtype).reshape(used["shape"])
            else:
                name, site = operator["name"], operator["site"]
                raise RuntimeError(f"{name} ({site}): what other processes sent is not here")
            found = found.to(self._device)
            if self._wide and found.is_floating_point():
                found = found.double()
            if number in self._values:  # in place
                self._values[number].copy_(found)
            else:
                self._values[number] = found

    def _next_use(self, after: int, number: int) -> dict[str, Any] | None:
        """A value as the next operator was given it that computes."""
        for operator in self._trace["operators"]:
            if operator["n"] > after and not operator["name"].startswith(_COLLECTIVES):
                for value in _values(operator):
                    if value["value"] == number:
                        return value
        return None

    def _draw(self, operator: dict[str, Any], drawn: list[torch.Tensor]) -> None:
        for value, tensor in zip(operator["outputs"], drawn, strict=True):
            wide = self._wide and tensor.is_floating_point()
            number, found = value["value"], tensor.to(self._device)
            found = found.double() if wide else found
            if number in self._values:  # in place
                self._values[number].copy_(found)
            else:
                self._values[number] = found.clone()

    def _argument(self, given: dict[str, Any], kind: str, name: str) -> Any:
        tensors = [self._get(value) for value in given.get("tensors", [])]
        if tensors:
            if given.get("list") is None:
                return tensors[0]
            if len(given["places"]) != len(tensors):
                raise RuntimeError(
                    f"{name} was a list of {len(given['places'])} tensors, and {len(tensors)} of "
                    "them were recorded"
                )
            entries: list[torch.Tensor | None] = [None] * given["list"]
            for place, tensor in zip(given["places"], tensors, strict=True):
                entries[place] = tensor
            return entries
        return self._scalar(given.get("scalar"), kind, name)

    def _scalar(self, value: Any, kind: str, name: str) -> Any:
        if isinstance(value, list):
            return [self._scalar(item, kind, name) for item in value]
        if name == "device":
            return torch.device(self._device)
        if isinstance(value, str) and value.startswith("torch."):
            found = getattr(torch, value.removeprefix("torch."))
            wide = self._wide and isinstance(found, torch.dtype) and found.is_floating_point
            return torch.float64 if wide else found
        if name == "generator":
            return None
        if isinstance(value, str) and kind not in ("str", "Optional[str]"):
            return float(value)  # inf, nan
        return value

    def _get(self, value: dict[str, Any]) -> torch.Tensor:
        number = value["value"]
        if number not in self._values:
            kept = self._tensors.get(str(number))
            tensor = (stand_in(value) if kept is None else kept).to(self._device)
            if self._wide and tensor.is_floating_point():
                tensor = tensor.double()
            self._values[number] = tensor.clone()
            self._given[number] = tensor
        return self._values[number]


def error(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Relative L2 difference; infinite where only one is finite, or shapes differ."""
    if exact.shape != other.shape:
        return math.inf
    exact, other = exact.double(), other.double()
    both = torch.isfinite(exact) & torch.isfinite(other)
    if not torch.equal(torch.isfinite(exact), torch.isfinite(other)):
        return math.inf
    size = float(exact[both].norm())
    difference = float((other[both] - exact[both]).norm())
    return difference / size if size else difference


def unavailable(device: str) -> str:
    """Why nothing can be run on a device here; empty where something can."""
    try:
        if device == "npu":
            importlib.import_module("torch_npu")
        torch.zeros(1, device=device)
    except Exception as problem:  # noqa: BLE001 - whatever a vendor's library raises without its driver
        return f"{type(problem).__name__}: {problem}"
    return ""


def main(words: list[str] | None = None) -> int:
    """Run, print and compare; the exit code."""
    here = Path(__file__).parent
    about = json.loads((here / "about.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=about["statement"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "npu"))
    parser.add_argument("--tolerance", type=float, default=about["tolerance"])
    args = parser.parse_args(words)
    lacking = unavailable(args.device)
    if lacking:
        print(f"cannot be run on {args.device}: {lacking}", file=sys.stderr)
        return 1
    sides = {}
    for side in ("benchmark", "target"):
        trace = json.loads((here / f"{side}.json").read_text(encoding="utf-8"))
        tensors = load(here / f"{side}.safetensors")
        recorded = [tensors.get(f"result{i}") for i in range(len(trace["results"]))]
        try:
            made = Replay(trace, tensors, args.device, False).run()
        except Exception as problem:  # noqa: BLE001 - an operator this device or torch lacks
            print(f"{side}: cannot be run on {args.device}: {problem}", file=sys.stderr)
            return 1
        try:
            wide = Replay(trace, tensors, "cpu", True).run()
        except Exception as problem:  # noqa: BLE001 - kernels that have no fp64
            print(f"{side}: cannot be run in fp64: {problem}", file=sys.stderr)
            wide = []
        sides[side] = recorded, made, wide
    print(about["statement"])
    return compare(sides, args.device, args.tolerance)


Side = tuple[list["torch.Tensor | None"], list[torch.Tensor], list[torch.Tensor]]


def compare(sides: dict[str, Side], device: str, tolerance: float) -> int:
    """Print both sides beside fp64; 3 while they differ."""
    recorded_b, made_b, wide_b = sides["benchmark"]
    recorded_t, made_t, wide_t = sides["target"]
    differ = len(made_b) != len(made_t)
    for index, (b, t) in enumerate(zip(made_b, made_t, strict=False)):
        known = recorded_b[index]
        base = b if known is None else known
        found = error(base, t)
        differ |= not found <= tolerance
        print(f"result {index}, shape {list(t.shape)}:")
        print(f"  target's operators on {device} against the benchmark's: {found:.3g}")
        if wide_b:
            exact = wide_b[index]
            print(f"  against the benchmark's in fp64: benchmark {error(exact, b):.3g}, "
                  f"target {error(exact, t):.3g}")  # fmt: skip
            if wide_t and wide_t[index].shape == exact.shape:
                print(
                    f"  target's in fp64 against the benchmark's: {error(exact, wide_t[index]):.3g}"
                )
        own = recorded_t[index]
        if own is not None:
            print(f"  target's on {device} against what the target recorded: {error(own, t):.3g}")
        for name, tensor in (("benchmark", base), ("target", t)):
            head = ", ".join(f"{float(x):.9g}" for x in tensor.reshape(-1)[:6])
            print(f"  {name}: {head}{', …' if tensor.numel() > 6 else ''}")
    print(f"they differ by more than {tolerance:.3g}" if differ else "they agree")
    return 3 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
