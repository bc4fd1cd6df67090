"""What a pickle of a batch describes, as plain values: columns, lists, texts, numbers, arrays.

torch's tensors, numpy's arrays and scalars, tensordict's containers and Python's own are known by
name. Anything else becomes a :class:`Foreign`, which is the name of its class and nothing more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlprobe.dumps import characters
from rlprobe.dumps.tensors import tensorpickle
from rlprobe.dumps.tensors.dtypes import DTYPES, DType
from rlprobe.dumps.tensors.pickled import Global, Object, Persistent
from rlprobe.dumps.tensors.tensorfile import Archive, over

#: Opcodes of one pickle, and values of one batch: of the largest, a few hundred for a sample.
MAX_OPCODES = 1 << 26
MAX_VALUES = 1 << 24
MAX_DEPTH = 64
#: Storages in an archive: debug files of slime hold tensors of each sample.
MAX_ENTRIES = 1 << 20


@dataclass(frozen=True)
class Foreign:
    """An object that is not loaded: the name of its class."""

    name: str


@dataclass(frozen=True, eq=False)
class Array:
    """Numbers of any element type: raw elements, shape kept."""

    dtype: DType
    raw: np.ndarray

    def rows(self) -> list[Any]:
        """What each row holds: an array, or a number where there is one."""
        if not self.raw.ndim:
            raise ValueError("a tensor without axes has no rows")
        return [Array(self.dtype, row).item() for row in self.raw]

    def item(self) -> Any:
        """The number of a tensor without axes; any other tensor itself."""
        if np.ndim(self.raw) or self.dtype.numbers > 1:
            return self
        from rlprobe.dumps.tensors import dtypes

        if self.dtype.name == "bool":
            return bool(self.raw)
        if self.dtype.kind == "int":
            return int(self.raw)
        return float(dtypes.numbers(np.asarray(self.raw).reshape(1), self.dtype, True)[0])


@dataclass(frozen=True)
class Rows:
    """A column that already is one value a sample, of lengths of their own or of any kind."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Same:
    """A column that is one value for all samples."""

    value: Any


@dataclass(frozen=True)
class DataProto:
    """verl's batch: what its pickle keeps of it."""

    batch: Any
    non_tensors: Any


class Reader:
    """Makes plain values of what :func:`pickled.parse` gave.

    Args:
        archive: where tensors keep their numbers; None: a tensor is refused.
    """

    def __init__(self, archive: Archive | None = None) -> None:
        self._archive = archive
        self._made: dict[int, Any] = {}
        self._open: set[int] = set()
        self._count = 0

    def plain(self, value: Any, depth: int = 0) -> Any:
        """The value without objects.

        Raises:
            ValueError: it holds itself, is nested too deeply, too large, or damaged.
        """
        self._count += 1
        if self._count > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
        if isinstance(value, (Global, Persistent)):
            return Foreign(str(value) if isinstance(value, Global) else "a persistent id")
        if not isinstance(value, (dict, list, tuple, Object)):
            return value
        # what stands in it twice is made once: else nested repetitions would multiply
        known = id(value)
        if known in self._made:
            return self._made[known]
        if known in self._open:
            raise ValueError("it holds itself")
        self._open.add(known)
        made = self._made[known] = self._container(value, depth + 1)
        self._open.discard(known)
        return made

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {_key(k): self.plain(v, depth) for k, v in value.items()}
        if isinstance(value, Object):
            return self._object(value, depth)
        return [self.plain(item, depth) for item in value]

    def _object(self, value: Object, depth: int) -> Any:
        made_by = value.made_by
        if made_by in tensorpickle.CALLS:
            return self._tensor(value)
        if not isinstance(made_by, Global):
            return Foreign("something that names no class")
        module = made_by.module.replace("numpy.core", "numpy._core")
        make = _KNOWN.get((module.replace("__builtin__", "builtins"), made_by.name))
        if make is None:
            return Foreign(str(made_by))
        try:
            return make(self, value, depth)
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"an object of {made_by} in it is damaged: {error!r:.100}") from error

    def _tensor(self, value: Object) -> Array:
        if self._archive is None:
            raise ValueError("a tensor in it has no storage")
        found = self._archive.tensor(tensorpickle.layout(value))
        return Array(found.dtype, found.view())

    def _mapping(self, value: Object, depth: int) -> dict[Any, Any]:
        """OrderedDict, defaultdict and the like."""
        given = [a for a in value.arguments if isinstance(a, (dict, list, tuple))]
        pairs = list(given[0].items() if isinstance(given[0], dict) else given[0]) if given else []
        return {_key(k): self.plain(v, depth) for k, v in (*pairs, *value.items)}

    def _list(self, value: Object, depth: int) -> list[Any]:
        """Sets, and lists of a class of their own."""
        given = value.arguments[0] if value.arguments else ()
        return [self.plain(item, depth) for item in (*given, *value.values)]

    def _bytes(self, value: Object, depth: int) -> bytes:
        """``_codecs.encode``, ``bytes`` and ``bytearray``: as the older protocols write bytes."""
        if not value.arguments:
            return b""
        if len(value.arguments) == 1:
            return bytes(self.plain(value.arguments[0], depth))
        text, encoding = value.arguments
        if encoding != "latin1":
            raise ValueError(f"bytes in it are written as {encoding!r:.20}")
        return str(text).encode("latin1")

    def _array(self, value: Object, depth: int) -> Any:
        _, shape, dtype, fortran, content = value.state
        shape = tuple(int(n) for n in tensorpickle.sizes(shape))
        kind = _numpy(dtype)
        if kind.hasobject:
            items = [self.plain(item, depth) for item in content]
            if math.prod(shape) != len(items):
                raise ValueError(f"an array in it claims shape {list(shape)}")
            if len(shape) < 2:
                return items if shape else items[0]
            width = math.prod(shape[1:])
            return [items[at : at + width] for at in range(0, len(items), width or 1)]
        return _shaped(self.plain(content, depth), kind, shape, "F" if fortran else "C")

    def _buffer(self, value: Object, depth: int) -> Any:
        """``_frombuffer``: an array as protocol 5 writes it."""
        content, dtype, shape, order = value.arguments
        sizes = tuple(int(n) for n in tensorpickle.sizes(shape))
        return _shaped(self.plain(content, depth), _numpy(dtype), sizes, order)

    def _scalar(self, value: Object, depth: int) -> Any:
        kind, content = value.arguments
        found = np.frombuffer(self.plain(content, depth), _numpy(kind))
        if found.size != 1:
            raise ValueError("a scalar in it holds no single number")
        return found[0].item()

    def _typed(self, value: Object, depth: int) -> Any:
        """``_rebuild_from_type_v2``: a call, the class it makes, its arguments, its attributes."""
        function, _, arguments = value.arguments[:3]
        return self._object(Object(function, tuple(arguments)), depth)

    def _jagged(self, value: Object, depth: int) -> Rows:
        """Rows of unlike lengths, one behind the other."""
        parts = value.arguments[0]
        lengths = parts.get("lengths")
        return _cut(
            self.plain(parts["values"], depth),
            self.plain(parts["offsets"], depth),
            None if lengths is None else self.plain(lengths, depth),
        )

    def _consolidated(self, value: Object, depth: int) -> dict[str, Any]:
        """A TensorDict in one piece: where each tensor lies in one storage of bytes."""
        metadata, storage = value.arguments[:2]
        whole = self.plain(storage, depth)
        return self._leaves(self.plain(metadata, depth), whole.raw.reshape(-1), depth)

    def _leaves(self, metadata: dict[str, Any], raw: np.ndarray, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
        found: dict[str, Any] = {
            key: Same(data) for key, (data, *_) in metadata["non_tensors"].items()
        }
        parts: dict[str, Any] = {}
        for key, (dtype, shape, start, stop, _) in metadata["leaves"].items():
            known = DTYPES.get(str(dtype).removeprefix("torch."))
            if known is None:
                raise ValueError(f"element type {dtype!r:.40} is not known")
            if not 0 <= start <= stop <= len(raw):
                raise ValueError(f"{key} lies outside its storage")
            strides = _strides(tuple(shape))
            tensor = over(known, tuple(shape), strides, raw[start:stop].tobytes(), 0)
            array = Array(known, tensor.view())
            if key.startswith(_JAGGED):
                parts[key] = array
            else:
                found[key] = array
        for key in (k for k in parts if k.startswith(_OFFSETS)):
            name = key[len(_OFFSETS) :]
            lengths = parts.get(_LENGTHS + name)
            found[name] = _cut(parts[_VALUES + name], parts[key], lengths)
        for key, inner in metadata.items():
            if key not in ("non_tensors", "leaves", "cls", "cls_metadata", "size"):
                found[key] = self._leaves(inner, raw, depth + 1)
        return found

    def _tensordict(self, value: Object, depth: int) -> Any:
        state = value.state if value.state is not None else value.arguments[1]
        if "tensordicts" in state:
            return Rows(tuple(self.plain(one, depth) for one in state["tensordicts"]))
        return self.plain(state["_tensordict"], depth)

    def _non_tensor(self, value: Object, depth: int) -> Any:
        """One value for all samples, or of one sample in a stack."""
        data = self.plain(value.state["non_tensordict"]["data"], depth)
        inner = value.state.get("_tensordict")
        sizes = inner.arguments[1].get("_batch_size") if isinstance(inner, Object) else ()
        return Same(data) if sizes and tensorpickle.sizes(sizes) else data

    def _stack(self, value: Object, depth: int) -> Rows:
        return Rows(tuple(self.plain(one, depth) for one in value.state["tensordicts"]))

    def _data_proto(self, value: Object, depth: int) -> DataProto:
        batch, non_tensors, _ = value.state
        if isinstance(batch, bytes):
            batch = read_archive(memoryview(batch))
        elif batch is not None:
            batch = self._serialised(self.plain(batch, depth)[2])
        return DataProto(batch, self.plain(non_tensors, depth))

    @staticmethod
    def _serialised(items: Mapping[str, Any]) -> dict[str, Any]:
        """VERL_DATAPROTO_SERIALIZATION_METHOD=numpy: element type, shape and bytes of each."""
        found: dict[str, Any] = {}
        for key, item in items.items():
            several = len(item) == 2
            arrays = [_of_bytes(*one) for one in (item[1] if several else [item])]
            found[key] = Rows(tuple(arrays)) if several else arrays[0]
        return found


def read_archive(data: memoryview) -> Any:
    """The plain value of a file that ``torch.save`` wrote.

    Raises:
        ValueError: it is none, damaged, or too large.
    """
    from rlprobe.dumps.tensors import pickled

    archive = Archive.open(data, MAX_ENTRIES)
    return Reader(archive).plain(pickled.parse(archive.pickle, MAX_OPCODES))


def read_pickle(data: memoryview) -> Any:
    """The plain value of a file that ``pickle.dump`` wrote.

    Raises:
        ValueError: it is none, damaged, or too large.
    """
    from rlprobe.dumps.tensors import pickled

    return Reader().plain(pickled.parse(data, MAX_OPCODES))


_VALUES, _LENGTHS, _OFFSETS = "<NJT_VALUES>", "<NJT_LENGTHS>", "<NJT_OFFSETS>"
_JAGGED = (_VALUES, _LENGTHS, _OFFSETS)
_NUMBERS = re.compile(r"(?:[biufc]\d{1,2}|[SU]\d{1,9}|O\d?|\?)")


def _key(value: Any) -> Any:
    """A key as it can be shown; whole numbers stay what they are."""
    if isinstance(value, (str, int, float, bytes)) or value is None:
        return value
    return str(value) if isinstance(value, Global) else f"<{type(value).__name__}>"


def _numpy(value: Any) -> np.dtype:
    """The dtype that a pickle describes: of numbers, texts or objects."""
    if not isinstance(value, Object) or value.made_by != Global("numpy", "dtype"):
        raise ValueError("an array in it has no element type")
    text = str(value.arguments[0])
    if not _NUMBERS.fullmatch(text):
        raise ValueError(f"element type {text!r:.40} is not known")
    kind = np.dtype(text)
    return kind.newbyteorder(">") if value.state and value.state[1] == ">" else kind


def _shaped(content: bytes, kind: np.dtype, shape: tuple[int, ...], order: str) -> Any:
    if kind.hasobject or kind.itemsize * math.prod(shape) != len(content):
        raise ValueError(f"an array in it claims shape {list(shape)}")
    flat = characters.require(np.frombuffer(content, kind))
    return _numbers(flat.reshape(shape, order="F" if order == "F" else "C"))


def _numbers(found: np.ndarray) -> Any:
    """An array of numbers; of texts, the texts."""
    if found.dtype.kind in "US":
        return found.tolist()
    found = found.astype(found.dtype.newbyteorder("<"), copy=False)
    known = DTYPES.get(found.dtype.name)
    if known is None:
        raise ValueError(f"element type {found.dtype} is not known")
    return Array(known, found.view(known.raw)).item()


def _of_bytes(dtype: str, shape: Any, raw: Any) -> Array:
    known = DTYPES.get(str(dtype))
    if known is None:
        raise ValueError(f"element type {dtype!r:.40} is not known")
    sizes = tuple(int(n) for n in shape)
    content = raw.raw.tobytes() if isinstance(raw, Array) else bytes(raw)
    return Array(known, over(known, sizes, _strides(sizes), content, 0).view())


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps: list[int] = []
    step = 1
    for length in reversed(shape):
        steps.append(step)
        step *= length
    return tuple(reversed(steps))


def _cut(values: Array, offsets: Array, lengths: Array | None) -> Rows:
    """Rows of values that lie one behind the other."""
    bounds = [int(n) for n in offsets.raw]
    ends = bounds[1:]
    if lengths is not None:
        ends = [a + int(n) for a, n in zip(bounds, lengths.raw, strict=False)]
    if not all(0 <= a <= b <= len(values.raw) for a, b in zip(bounds, ends, strict=False)):
        raise ValueError("rows in it lie outside their values")
    return Rows(
        tuple(Array(values.dtype, values.raw[a:b]) for a, b in zip(bounds, ends, strict=False))
    )


_Make = Callable[[Reader, Object, int], Any]
_TUPLE: _Make = lambda reader, value, depth: list(tensorpickle.sizes(value))  # noqa: E731
_KNOWN: dict[tuple[str, str], _Make] = {
    ("collections", "OrderedDict"): Reader._mapping,
    ("collections", "defaultdict"): Reader._mapping,
    ("collections", "Counter"): Reader._mapping,
    ("builtins", "dict"): Reader._mapping,
    ("builtins", "set"): Reader._list,
    ("builtins", "frozenset"): Reader._list,
    ("_codecs", "encode"): Reader._bytes,
    ("builtins", "bytes"): Reader._bytes,
    ("builtins", "bytearray"): Reader._bytes,
    ("torch", "Size"): _TUPLE,
    ("numpy._core.multiarray", "_reconstruct"): Reader._array,
    ("numpy._core.multiarray", "scalar"): Reader._scalar,
    ("numpy._core.numeric", "_frombuffer"): Reader._buffer,
    ("torch._tensor", "_rebuild_from_type_v2"): Reader._typed,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): Reader._jagged,
    ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"): Reader._consolidated,
    ("tensordict._reductions", "_make_td"): Reader._tensordict,
    ("tensordict._td", "TensorDict"): Reader._tensordict,
    ("tensordict._lazy", "LazyStackedTensorDict"): Reader._tensordict,
    ("tensordict.tensorclass", "NonTensorData"): Reader._non_tensor,
    ("tensordict.tensorclass", "NonTensorStack"): Reader._stack,
    ("verl.protocol", "DataProto"): Reader._data_proto,
}
