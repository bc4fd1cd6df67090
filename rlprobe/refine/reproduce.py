"""A folder that shows a divergence without rlprobe or a framework: ``rlprobe reproduce``."""

from __future__ import annotations

import json
import logging
import math
import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rlprobe.diagnose import diagnosis
from rlprobe.dumps.results import SIDES
from rlprobe.dumps.tensors.spans import Span, spans
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError, map_file, read_tensor
from rlprobe.errors import DumpError, UsageError
from rlprobe.files import replace_bytes
from rlprobe.judge.inputs import Results
from rlprobe.judge.origin import ACCUMULATION, REDUCTION
from rlprobe.refine import refined, suspects, trace
from rlprobe.refine.trace import Operator, Trace, Value
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

_log = logging.getLogger(__name__)
_SIDES = ("benchmark", "target")
#: Tolerance where the noise floor is not known: some roundings of fp32.
_TOLERANCE = 1e-6
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


#: Formats that a result may have: whole numbers among what is handed out are counts and masks.
_FLOATS = ("torch.float", "torch.bfloat")
#: What happens to gradients before the update begins.
_BEFORE = (ACCUMULATION, REDUCTION)
#: Questions about rows of several lengths, whose answers are no gradients.
_OF_ROWS = "aten::_nested_get_"


@dataclass
class _Side:
    name: str
    trace: Trace
    found: dict[str, Span]

    def operators(self, backward: bool) -> list[Operator]:
        """The operators to be run: those of the forward, and of the backward where it parts.

        Around the model those that what is handed out depends on; of an update those after its
        gradients are complete.
        """
        every = self.trace.operators if self.trace.kind == "module" else self.trace.live()
        if backward:
            return every
        return [op for op in every if op.direction == "forward"]

    def results(self, backward: bool) -> list[Value]:
        """What they make: the outputs, the parameters, or gradients that nothing is made of."""
        if self.trace.kind == "update":
            return self._parameters()
        if not backward:
            return [value for value in self.trace.outputs if value.dtype.startswith(_FLOATS)]
        back = [
            op
            for op in self.trace.operators
            if op.direction == "backward" and not op.name.startswith(_OF_ROWS)
        ]
        used = {value.value for op in back for value in op.inputs}
        return [value for op in back for value in op.outputs if value.value not in used]

    def _parameters(self) -> list[Value]:
        """The parameters that the update wrote."""
        operators = self.operators(False)
        named = {
            value.value: value
            for op in operators
            for value in op.inputs
            if (value.origin or "").startswith("parameter ")
        }
        written = {
            value.value
            for op in operators
            if op.arguments and op.name.rpartition("::")[2].split(".")[0].endswith("_")
            for value in op.arguments[0].tensors
        }
        return [value for number, value in named.items() if number in written]

    def kept(self, backward: bool) -> dict[str, str]:
        """Name in the safetensors file -> the file that holds it."""
        found = {}
        for op in self.operators(backward):
            values = [*op.inputs, *(op.outputs if op.name.startswith("module::") else [])]
            for value in values:
                if value.data is not None:
                    found[str(value.value)] = value.data
            if not op.name.startswith("module::"):
                for index, value in enumerate(op.outputs):
                    if value.data is not None:
                        found[f"drawn{op.n}.{index}"] = value.data
        if not backward and self.trace.kind != "update":
            for index, value in enumerate(self.results(False)):
                if value.data is not None:
                    found[f"result{index}"] = value.data
        return found


def reproduce(results: Path, out: Path, *, data: bool) -> int:
    """Write the folder; returns its bytes.

    Args:
        results: RESULTS_DIR of an alignment that was refined.
        out: the folder, which must not hold anything yet.
        data: whether tensors are copied; without, the script makes up numbers of their sizes.

    Raises:
        UsageError: there is something in the folder.
        DumpError: nothing was refined, no module was traced, or a file is damaged.
        StoreError: a run is damaged.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not empty: give a folder that is not there yet")
    found, wanted = _refined(results)
    store = Results.open(results).store
    sides = [
        _side(name, Run.open(store, key), wanted)
        for name, key in zip(_SIDES, found.refining, strict=True)
    ]
    backward = ".backward." in wanted.record
    size = sum(
        side.found[file].size
        for side in sides
        for file in set(side.kept(backward).values())
        if file in side.found
    )
    _log.info("%s: %.1f MB of tensors%s", out, size / 1e6, "" if data else " are left out")
    whole = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir(parents=True)
    try:
        for side in sides:
            _write_side(whole, side, backward, data)
        _write_about(whole, diagnosis.answer(results), found, wanted, sides)
        if out.exists():
            out.rmdir()
        whole.rename(out)
    finally:
        shutil.rmtree(whole, ignore_errors=True)
    return sum(path.stat().st_size for path in out.iterdir())


def _refined(results: Path) -> tuple[refined.Refined, Suspects]:
    if (results / SIDES).is_file() and not suspects.there(results):
        raise DumpError(
            f"{results} is a comparison of two dumps, and nothing of theirs can be run again; dump "
            "the suspect on both sides with task tensor: its inputs and outputs are then in the "
            "dumps. An alignment is reproduced from `rlprobe refine --config FILE`"
        )
    plan = suspects.read(results)
    found = refined.read(results)
    if plan.suspects is None:
        raise DumpError(f"{results}: there is nothing to reproduce: {plan.reason}")
    if found is None:
        raise DumpError(f"{results} was not refined; `rlprobe refine` first")
    if plan.suspects.trace == "update" and plan.origin in _BEFORE:
        raise DumpError(
            f"{results}: {plan.suspects.stage} parts in the {plan.origin} of its gradients, in the "
            "middle of the backward pass; refine/diagnosis.json has its operators, and there is "
            "no call to run again"
        )
    return found, plan.suspects


def _side(name: str, run: Run, wanted: Suspects) -> _Side:
    directory = run.written(wanted.stage, wanted.step, wanted.rank)
    path = directory / trace.NAME
    found = trace.read(path)
    if found is None or not found.operators:
        what = wanted.trace_module or f"the {wanted.trace}"
        raise DumpError(f"{path}: no operators of {what} were traced; refine again")
    return _Side(name, found, spans(run.path, directory.relative_to(run.dump).as_posix()))


def _write_side(out: Path, side: _Side, backward: bool, data: bool) -> None:
    operators = side.operators(backward)
    body = {
        "module": side.trace.module,
        "device": side.trace.device,
        "versions": side.trace.versions,
        "operators": [msgspec.to_builtins(_slim(op)) for op in operators],
        "results": [value.value for value in side.results(backward)],
        # of an update what it adds to the parameters
        "changes": side.trace.kind == "update",
    }
    replace_bytes(out / f"{side.name}.json", json.dumps(body, indent=1).encode())
    if not data:
        return
    kept = side.kept(backward)
    tensors = {}
    for name, file in kept.items():
        if file not in side.found:
            continue
        span = side.found[file]
        try:
            raw = map_file(span.file)[span.offset : span.offset + span.size]
            tensors[name] = read_tensor(raw, file)
        except (OSError, TensorFileError) as error:
            raise DumpError(f"{span.file}: {file}: {error}") from error
    save(out / f"{side.name}.safetensors", tensors)


def _slim(op: Operator) -> Operator:
    """Without sketches, which the script has no use for."""

    def plain(value: Value) -> Value:
        return msgspec.structs.replace(value, sketch=None)

    arguments = [
        msgspec.structs.replace(argument, tensors=[plain(v) for v in argument.tensors])
        for argument in op.arguments
    ]
    outputs = [plain(v) for v in op.outputs]
    return msgspec.structs.replace(op, arguments=arguments, outputs=outputs)


def save(path: Path, tensors: dict[str, TensorFile]) -> None:
    """Write a safetensors file (its format: 8 bytes of length, a JSON header, the elements).

    Of every element type it has; numpy, with which its own library would write, lacks bfloat16.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype.name not in _DTYPES:
            continue
        size = math.prod(tensor.shape) * tensor.dtype.size
        header[name] = {
            "dtype": _DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in header:
            file.write(np.ascontiguousarray(tensors[name].view()).tobytes())


def _write_about(
    out: Path,
    found: diagnosis.Diagnosis,
    looked: refined.Refined,
    wanted: Suspects,
    sides: list[_Side],
) -> None:
    floor = found.noise.get("first", {}).get("floor")
    known = isinstance(floor, float) and floor > 0 and math.isfinite(floor)
    about = {
        "statement": found.sentence,
        "cause": None if found.cause is None else found.cause.statement,
        "module": wanted.trace_module,
        "stage": wanted.stage,
        "record": wanted.record,
        "error": looked.error,
        "tolerance": floor if known else _TOLERANCE,
        "versions": {side.name: {"device": side.trace.device, **side.trace.versions}
                     for side in sides},
    }  # fmt: skip
    replace_bytes(out / "about.json", json.dumps(about, indent=1).encode())
    script = resources.files("rlprobe.capture.trace").joinpath("replay.py").read_bytes()
    replace_bytes(out / "reproduce.py", script)
