"""Files of rollouts, each read into its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.dumps.key_data import MicroBatch
from rlprobe.dumps.rollouts import plain
from rlprobe.dumps.rollouts.plain import Array, DataProto, Rows, Same
from rlprobe.dumps.rollouts.sample import Sample, build
from rlprobe.dumps.tensors.tensorfile import TensorFileError, map_file
from rlprobe.errors import DumpError

#: Largest file that is read: what a pickle holds is copied.
_MAX_BYTES = 4 << 30
_MAX_ROWS = 1 << 22


@dataclass
class Rollout:
    """What a file holds."""

    samples: list[Sample] = field(default_factory=list)
    #: Rows that could not be read: which, and why.
    unread: list[tuple[str, str]] = field(default_factory=list)
    #: The step that the file itself says; None where it says none.
    step: int | None = None


def jsonl(path: Path) -> Rollout:
    """A line a sample, as verl's ``_dump_generations`` writes it: input, output, score and more.

    A line that cannot be read costs itself alone.

    Raises:
        DumpError: the file cannot be read.
    """
    found = Rollout()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number > _MAX_ROWS:
                    raise DumpError(f"{path} holds more than {_MAX_ROWS} samples")
                if line.strip():
                    _line(found, line, f"line {number}", path)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
    return found


def _line(found: Rollout, line: bytes, where: str, path: Path) -> None:
    try:
        repeated: list[str] = []
        value = jsonfile.mapping(
            jsonfile.parse(line, nonfinite=True, any_text=True, repeated=repeated)
        )
        if repeated:
            raise DocumentError(f"key {repeated[0]!r:.60} stands twice in it")
        found.samples.append(build(value, "input", "output", f"{path}, {where}", {}))
    except (DocumentError, DumpError) as error:
        found.unread.append((where, str(error)))


def data_proto(path: Path) -> Rollout:
    """verl's ``gen_batch.dp``: a pickled DataProto, padded prompts left, responses right.

    Raises:
        DumpError: it is no such file, or damaged; nothing in it is ever loaded.
    """
    batch = _plain(path, plain.read_pickle)
    if not isinstance(batch, DataProto):
        raise DumpError(f"{path} holds {_what(batch)}, no DataProto of verl")
    tensors = batch.batch if isinstance(batch.batch, dict) else {}
    others = batch.non_tensors if isinstance(batch.non_tensors, dict) else {}
    return _rows({**others, **tensors}, path)


def transfer_queue(path: Path) -> Rollout:
    """verl's ``tq_batch.pt``: ``{"tensordict", "keys", "tags", "global_steps"}``.

    Raises:
        DumpError: it is no such file, or damaged.
    """
    payload = _plain(path, plain.read_archive)
    columns = payload.get("tensordict") if isinstance(payload, dict) else None
    if not isinstance(columns, dict):
        raise DumpError(f"{path} holds {_what(payload)}, no batch of verl's TransferQueue")
    return _rows(columns, path)


def slime(path: Path) -> Rollout:
    """slime's debug rollouts: ``{"rollout_id", "samples": [dict]}``.

    Raises:
        DumpError: it is no such file, or damaged.
    """
    payload = _plain(path, plain.read_archive)
    samples = payload.get("samples") if isinstance(payload, dict) else None
    if not isinstance(samples, list):
        raise DumpError(f"{path} holds {_what(payload)}, no debug rollouts of slime")
    step = payload.get("rollout_id")
    found = Rollout(step=step if type(step) is int and step >= 0 else None)
    for number, one in enumerate(samples):
        where = f"sample {number}"
        try:
            if not isinstance(one, dict):
                raise DumpError(f"{path}, {where}: it is {_what(one)}, no mapping")
            fields = {str(key): value for key, value in one.items()}
            prompt = _prompt_of(fields)
            found.samples.append(
                build(fields, "prompt", "response", f"{path}, {where}", {"prompt": prompt})
                if "response" in fields
                else build(fields, "prompt", "tokens", f"{path}, {where}", {"prompt": prompt})
            )
        except DumpError as error:
            found.unread.append((where, str(error)))
    return found


def _prompt_of(fields: Mapping[str, Any]) -> Any:
    """slime's prompt: its text or messages; without them, its part of the tokens."""
    prompt = fields.get("prompt")
    tokens, length = fields.get("tokens"), fields.get("response_length")
    if prompt or not isinstance(tokens, list) or type(length) is not int:
        return prompt
    return tokens[: len(tokens) - length]


def _plain(path: Path, read: Callable[[memoryview], Any]) -> Any:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DumpError(f"{path} is larger than {_MAX_BYTES} bytes, the most that is read")
        return read(map_file(path))
    except (OSError, TensorFileError) as error:
        raise DumpError(f"{path}: {error}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise DumpError(f"{path} is not read: {error}") from error


def _what(value: Any) -> str:
    if isinstance(value, plain.Foreign):
        return f"an object of {value.name}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _rows(columns: Mapping[str, Any], path: Path) -> Rollout:
    """Samples of a batch kept by columns."""
    lists, common = {}, {}
    for key, column in columns.items():
        if isinstance(column, Same):
            common[key] = column.value
        elif isinstance(column, Array) and column.raw.ndim:
            lists[key] = column.rows()
        elif isinstance(column, (Rows, list, tuple)):
            lists[key] = list(column.values if isinstance(column, Rows) else column)
        else:
            common[key] = column
    prompts = lists.get("prompts")
    if prompts is None or "responses" not in lists:
        raise DumpError(
            f"{path}: there are no prompts and responses, which name a sample; found "
            f"{', '.join(sorted(columns)) or 'nothing'}"
        )
    odd = next((key for key, rows in lists.items() if len(rows) != len(prompts)), None)
    if odd is not None:
        raise DumpError(
            f"{path}: {odd} has {len(lists[odd])} rows, prompts have {len(prompts)}: the batch is "
            "damaged"
        )
    batch = _masked(lists)
    found = Rollout()
    for row in range(len(prompts)):
        fields = {key: _trimmed(batch, rows[row], row, key) for key, rows in lists.items()}
        where = f"{path}, row {row}"
        found.samples.append(build({**fields, **common}, "prompts", "responses", where, {}))
    return found


def _masked(lists: Mapping[str, list[Any]]) -> MicroBatch:
    """Which positions of padded rows are tokens."""
    masks, responses = lists.get("attention_mask"), lists["responses"]
    if not masks or not all(isinstance(m, Array) and m.raw.ndim == 1 for m in (*masks, *responses)):
        return MicroBatch()
    if len({len(mask.raw) for mask in masks}) != 1 or len({len(r.raw) for r in responses}) != 1:
        return MicroBatch()
    valid = np.stack([mask.raw.astype(bool) for mask in masks])
    return MicroBatch(valid=valid, response_width=len(responses[0].raw))


def _trimmed(batch: MicroBatch, value: Any, row: int, key: str) -> Any:
    if not isinstance(value, Array):
        return value
    return Array(value.dtype, batch.trimmed(value.raw, row, key))
