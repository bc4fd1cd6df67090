"""Keep what training has changed of a model: weights, optimizer state, buffers, generators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlprobe.capture.names import parameter_name, unwrap
from rlprobe.capture.state import generators, optimizers
from rlprobe.capture.state.index import Index, Parameter, stem

#: Bytes of tensors that are brought to the host at a time: one file.
FILE_BYTES = 1 << 30


def keep(
    directory: Path,
    *,
    role: str,
    rank: int,
    world_size: int,
    step: int,
    models: list[nn.Module],
    optimizer: Any,
) -> int:
    """Write this process's part of a model's state; calls no collective.

    Frozen parameters are left out: nothing changes them.

    Args:
        directory: of the step.
        role, rank, world_size, step: of the process, and the step that begins.
        models: the model's chunks.
        optimizer: torch's, or Megatron's around one, whose main parameters are the weights.

    Returns:
        Bytes written.

    Raises:
        RunError: numbers are not on the device now, or the optimizer's state is not understood.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = _Files(directory, stem(role, rank))
    parameters: dict[str, Parameter] = {}
    for item, inner in optimizers.stepped(models, optimizer):
        tensors, numbers = optimizers.state_of(inner, item)
        files.add(f"weight:{item.name}", item.local)
        for key, value in tensors.items():
            files.add(f"{key}:{item.name}", value)
        parameters[item.name] = Parameter(
            shape=tuple(item.shape),
            local_shape=tuple(item.local.shape),
            offset=item.offsets(),
            complete=item.complete,
            tensors=tuple(sorted(tensors)),
            numbers=numbers,
        )
    found = dict(buffers(models))
    for name, buffer in found.items():
        files.add(f"buffer:{name}", buffer)
    random, plain = generators.kept()
    for device, state in random.items():
        files.add(f"generator:{device}", state)
    files.flush()
    index = Index(
        role=role,
        rank=rank,
        world_size=world_size,
        step=step,
        optimizer=optimizers.name(optimizer),
        files=tuple(files.names),
        parameters=parameters,
        buffers=tuple(found),
        generators=plain,
    )
    index.write(directory)
    return files.written


def buffers(models: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint would hold, by their Hugging Face paths."""
    for index, model in enumerate(models):
        prefix, _ = unwrap(model)
        chunk = f"{index}." if len(models) > 1 else ""
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    whole = f"{path}.{name}" if path else name
                    yield chunk + parameter_name(whole, prefix), buffer


class _Files:
    """safetensors files of at most about :data:`FILE_BYTES`, so that little is on the host."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._waiting: dict[str, Tensor] = {}
        self._size = 0
        self.names: list[str] = []
        self.written = 0

    def add(self, key: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._size + size > FILE_BYTES:
            self.flush()
        # a copy: parts of one flat parameter share its storage, which the format refuses
        self._waiting[key] = tensor.detach().to("cpu", copy=True).contiguous()
        self._size += size

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        # there where transformers is; rlprobe alone does not ask for it
        from safetensors.torch import save_file

        name = f"{self._name}-{len(self.names):03}.safetensors"
        save_file(self._waiting, self._directory / name)
        self.names.append(name)
        self.written += self._size
        self._waiting, self._size = {}, 0
