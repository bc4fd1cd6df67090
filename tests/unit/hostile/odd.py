"""Strategies of Hypothesis for inputs that are nearly right, by the structure of their format.

Each takes a good input (``good.py``) apart, changes some of what it is made of (values, keys, tags,
headers, lengths, columns, members), and puts it together again so that readers get as far as what
was changed: digests and lengths fit unless they are what is changed. Bytes are changed as well.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import yaml
from hypothesis import strategies as st

from rlprobe.store import bundle
from tests.unit.hostile import good

Draw = Callable[[st.SearchStrategy[Any]], Any]

#: What a file may hold instead of what belongs there.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**50, 1e308, -0.0, 1e-320),
    *("", "x", "\x00", "\x1b[31m", "\ud800", "é\u202e", "../../x", "/etc/passwd", "None", "1e999"),
    *(float("nan"), float("inf"), float("-inf"), "9" * 5000, "x" * 20_000),
    *([], {}, [[]], [None], {"": None}, {"x": {"x": []}}, ["x"] * 300, [[[[[[[[[[1]]]]]]]]]]),
)
#: Texts put into a text, where it may be anywhere.
PIECES = (
    *("[" * 3000, "{" * 3000, '{"a":' * 500, "&a [*a]", "!!bool 3", "!!int x"),
    *("!!timestamp 2026-13-45", '"\\ud800"', '"\\UFFFFFFFF"', "9" * 5000, "NaN", "-Infinity"),
    *("\x00", "\x1b", "%YAML 9.9\n---\n"),
    *("<<: *a", "? [a]", "- " * 500, "\t", "\r", "\ufeff", "'", '"', "\\", ",", ":", "\n", "e999"),
)  # fmt: skip
_TAGS = ("!!int", "!!float", "!!bool", "!!null", "!!str", "!!set", "!!omap", "!!binary", "!x",
         "!!timestamp", "!!python/object/apply:os.system")  # fmt: skip

_scalars = (
    st.sampled_from(ODD)
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.booleans()
    | st.none()
)
values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place below a value: what holds it, and its key or index."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending and len(found) < 3000:
        node = pending.pop()
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            found.append((node, key))
            if isinstance(child, dict | list):
                pending.append(child)
    return found


@st.composite
def edited(draw: Draw, value: Any) -> Any:
    """A structure with some of its nodes replaced, dropped, doubled, renamed, wrapped or moved."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        nodes = _nodes(value) if isinstance(value, dict | list) else []
        if not nodes:
            return copy.deepcopy(draw(values))
        parent, key = nodes[draw(st.integers(0, len(nodes) - 1))]
        action = draw(st.sampled_from(("value", "value", "drop", "rename", "wrap", "move", "more")))
        if action == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=6) | st.sampled_from(("", "\ud800", "a.b")))] = parent.pop(
                key
            )
        elif action == "drop":
            del parent[key]
        elif action == "wrap":
            for _ in range(draw(st.sampled_from((1, 10, 70)))):
                parent[key] = [parent[key]] if draw(st.booleans()) else {"x": parent[key]}
        elif action == "move":
            other, place = nodes[draw(st.integers(0, len(nodes) - 1))]
            with contextlib.suppress(KeyError, IndexError):
                parent[key] = copy.deepcopy(other[place])
        elif action == "more" and isinstance(parent, list):
            parent[key:key] = [copy.deepcopy(parent[key])] * draw(st.sampled_from((1, 5, 300)))
        else:
            # a copy: what is drawn is the same object each time, and may be edited next
            parent[key] = copy.deepcopy(draw(values))
    return value


@st.composite
def mangled(draw: Draw, data: bytes, near_the_end: bool = False) -> bytes:
    """Bytes with bits flipped, pieces put in, taken out, doubled or overwritten."""
    found = bytearray(data)
    for _ in range(draw(st.sampled_from((1, 1, 2, 8)))):
        least = max(0, len(found) - 600) if near_the_end and draw(st.booleans()) else 0
        at = draw(st.integers(least, len(found)))
        action = draw(st.sampled_from(("flip", "flip", "put", "cut", "double", "word")))
        if action == "put":
            piece = draw(st.sampled_from(PIECES) | st.binary(max_size=8))
            found[at:at] = piece if isinstance(piece, bytes) else piece.encode()
        elif action == "cut":
            del found[at : at + draw(st.sampled_from((1, 4, 64, len(found))))]
        elif action == "double":
            found[at:at] = found[at : at + draw(st.sampled_from((1, 16, 256)))]
        elif action == "word":
            word = draw(st.sampled_from((b"\xff" * 8, bytes(8), (2**62).to_bytes(8, "little"))))
            found[at : at + 8] = word
        elif at < len(found):
            found[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(found)


# -------------------------------------------------------------------------------- text formats


@st.composite
def documents(draw: Draw, reader: str) -> bytes:
    """A document of JSON, or of a line each."""
    said = good.LINES.get(reader) or good.DOCUMENTS[reader]
    found = draw(edited(said))
    if reader in good.LINES and not isinstance(found, list):
        found = [found]  # every line was edited away but one
    text = good.text_of(reader, found)
    data = text.encode("utf-8", "surrogatepass")
    return draw(mangled(data)) if draw(st.sampled_from((False, False, False, True))) else data


@st.composite
def manifests(draw: Draw) -> bytes:
    """A run's manifest, written as it is always written."""
    return _line(draw(edited(json.loads(good.run()[1]))))


def _yaml_text(draw: Draw, depth: int, known: list[str]) -> str:
    """A node in flow style, with tags, anchors, aliases and merge keys."""
    kinds = ["scalar", "plain", "alias"] + (["list", "map", "tag", "anchor"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "alias" and known:
        return f"*{draw(st.sampled_from(known))}"
    if kind == "list":
        inner = [_yaml_text(draw, depth - 1, known) for _ in range(draw(st.integers(0, 3)))]
        return f"[{', '.join(inner)}]"
    if kind == "map":
        keys = [draw(st.sampled_from(("a", "<<", "? [b]", "1", '"\\ud800"', "*a"))) for _ in "ab"]
        return "{" + ", ".join(f"{k} : {_yaml_text(draw, depth - 1, known)}" for k in keys) + "}"
    if kind == "tag":
        return f"{draw(st.sampled_from(_TAGS))} {_yaml_text(draw, depth - 1, known)}"
    if kind == "anchor":
        name = draw(st.sampled_from(("a", "b", "c")))
        known.append(name)
        return f"&{name} {_yaml_text(draw, depth - 1, known)}"
    if kind == "plain":
        return str(draw(st.sampled_from(("~", "yes", "0x1F", "0o17", "1_000", "1:30", ".inf", "|",
                                         ">-", "2026-13-45", "!!", "- -", "9" * 500))))  # fmt: skip
    return json.dumps(draw(_scalars))


@st.composite
def yamls(draw: Draw, reader: str) -> bytes:
    """A file of YAML: edited, or with nodes that only YAML has in place of one."""
    said = draw(edited(good.yaml_values()[reader]))
    if not isinstance(said, dict) or draw(st.booleans()):
        text = json.dumps(said)  # is YAML as well
    else:
        with contextlib.suppress(Exception):  # what YAML cannot say is said as JSON
            text = yaml.safe_dump(said, allow_unicode=draw(st.booleans()))
            if draw(st.booleans()):
                key = draw(st.sampled_from([*sorted(map(str, good.yaml_values()[reader])), "x"]))
                text += f"{key}: {_yaml_text(draw, 4, [])}\n"
            return text.encode("utf-8", "surrogatepass")
        text = json.dumps(said)
    data = text.encode("utf-8", "surrogatepass")
    return draw(mangled(data)) if draw(st.booleans()) else data


# ------------------------------------------------------------------------------------- arrays

_TYPES = ("<f4", "<f8", ">f4", "<f2", "|b1", "<i8", "<i4", "|i1", "<u8", "|O", "<U5", "|S3", "<c8",
          "<M8[ns]", "|V8", "<f99", "", "f4", "<i3")  # fmt: skip
_sizes = st.integers(0, 5) | st.sampled_from((-1, 2**31, 2**62, 10**20, 64))


@st.composite
def npys(draw: Draw) -> bytes:
    """An array file whose header says other things than it should."""
    descr: Any = draw(st.sampled_from(_TYPES))
    if draw(st.sampled_from((False, False, False, True))):
        descr = [("a", descr), ("b", "<f4", (2,))]
    shape = tuple(draw(st.lists(_sizes, max_size=5)))
    said = {"descr": descr, "fortran_order": draw(st.sampled_from((False, True, 0, None)))}
    said["shape"] = draw(st.sampled_from((shape, list(shape), shape * 20, "x")))
    if draw(st.booleans()):
        del said[draw(st.sampled_from(sorted(said)))]
    text = draw(st.sampled_from((repr(said), repr(said) + " " * 40 + "\n", "{" + repr(said))))
    header = text.encode("utf-8", "replace")
    length = draw(st.sampled_from((len(header), len(header), len(header), 0, 65535)))
    version = draw(
        st.sampled_from((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x01"))
    )
    size = length.to_bytes(2 if version == b"\x01\x00" else 4, "little")
    body = bytes(draw(st.sampled_from((0, 1, 8, 24, 96, 4096))))
    return b"\x93NUMPY" + version + size + header + body


@st.composite
def npzs(draw: Draw, right: dict[str, Any]) -> bytes:
    """An archive with other arrays than belong there."""
    arrays = dict(right)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(right)))
        action = draw(st.sampled_from(("drop", "raw", "array", "array", "more")))
        if action == "drop":
            arrays.pop(name, None)
        elif action == "raw":
            arrays[name] = draw(npys() | st.binary(max_size=20))
        elif action == "more":
            arrays[draw(st.sampled_from(("x", "../x", "names", "é")))] = np.zeros(1)
        else:
            arrays[name] = _array(draw)
    data = good.npz(
        arrays,
        draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))),
    )
    return draw(mangled(data, True)) if draw(st.booleans()) else data


def _array(draw: Draw) -> np.ndarray[Any, Any]:
    kind = draw(st.sampled_from(("<f4", "<f8", "<i8", "<i4", "|b1", "<U3", "|S2", "<c8", "|u1")))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    number = draw(st.sampled_from((0, 1, -1, 2**31 - 1, 77)))
    if kind == "<U3" and draw(st.booleans()):  # half a character, and a number that is none
        return np.full(shape, draw(st.sampled_from((0xD800, 0x110000))), "<u4").view("<U1")
    with np.errstate(all="ignore"):
        return np.full(shape, number).astype(kind)


@st.composite
def saved_tensors(draw: Draw) -> bytes:
    """A ``.pt`` file with another pickle than torch writes, or an array file."""
    operations = list(good.PICKLE)
    more = (
        b"cos\nsystem\n", b"R", b"b", b"\x81", b".", b"0", b"(", b"t", b"l", b"d", b"N", b"\x88",
        b"K\xff", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 9, b"M\xff\xff", b"h\x63",
        b"X\xff\xff\xff\x7f", b"Q", b"ctorch\nBFloat16Storage\n", b"ctorch\nUntypedStorage\n",
        b"ctorch._utils\n_rebuild_tensor_v3\n", b"G" + b"\x7f\xf0" + bytes(6), b"\x95" + bytes(8),
    )  # fmt: skip
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(operations) - 1))
        action = draw(st.sampled_from(("drop", "double", "put", "replace")))
        if action == "drop" and len(operations) > 1:
            del operations[at]
        elif action == "double":
            operations.insert(at, operations[at])
        elif action == "put":
            operations.insert(at, draw(st.sampled_from(more)))
        else:
            operations[at] = draw(st.sampled_from(more))
    size = draw(st.sampled_from((48, 48, 0, 47, 4096)))
    compression = draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    data = good.saved_tensor(b"".join(operations), bytes(size), compression)
    return draw(mangled(data, True)) if draw(st.booleans()) else data


@st.composite
def safetensors(draw: Draw) -> bytes:
    """A safetensors file with another header, or another length of it."""
    header = json.dumps(draw(edited(good.SAFETENSORS))).encode("utf-8", "surrogatepass")
    length = draw(st.sampled_from((None, None, None, 0, 1, 2**62, -1, len(header) - 1)))
    return good.safetensors(header, length, bytes(draw(st.sampled_from((0, 32, 100)))))


# ------------------------------------------------------------------- tables, rollouts, bundles


@st.composite
def parquets(draw: Draw) -> bytes:
    """A record table with other columns, values or marks, or damaged where its footer is."""
    import polars as pl

    from rlprobe import formats

    table = good.records()
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(table.columns or ["x"]))
        kind = draw(st.sampled_from(("drop", "null", "text", "name", "rows", "list", "number")))
        if kind == "drop" and table.width > 1:
            table = table.drop(name)
        elif kind == "null":
            table = table.with_columns(pl.lit(None, table.schema[name]).alias(name))
        elif kind == "text":
            table = table.with_columns(pl.lit(draw(st.text(max_size=5))).alias(name))
        elif kind == "name":
            table = table.rename({name: f"{name}\x1b"})
        elif kind == "rows":
            table = draw(st.sampled_from((table.clear(), pl.concat([table, table]), table.head(1))))
        elif kind == "list":
            table = table.with_columns(pl.lit([[1]]).first().alias(name))
        else:
            table = table.with_columns(
                pl.lit(draw(st.sampled_from((-1, 2**62, 1e308)))).alias(name)
            )
    marks: Any = (formats.mark("records"), None, formats.mark("x"), formats.mark("records", 9),
                  {formats.PARQUET: "["}, {formats.PARQUET: "{}"})  # fmt: skip
    buffer = io.BytesIO()
    table.write_parquet(
        buffer,
        compression=draw(st.sampled_from(("lz4", "zstd", "uncompressed"))),
        metadata=draw(st.sampled_from(marks)),
    )
    data = buffer.getvalue()
    return draw(mangled(data, True)) if draw(st.booleans()) else data


@st.composite
def rollouts(draw: Draw) -> bytes:
    """A file of rollouts with other members, types, shapes, links, filters or JSON."""
    buffer = io.BytesIO(good.rollouts())
    with h5py.File(buffer, "r+", libver="earliest") as file:
        for _ in range(draw(st.integers(1, 3))):
            _edit_rollouts(draw, file)
    data = buffer.getvalue()
    return draw(mangled(data)) if draw(st.sampled_from((False, False, True))) else data


def _edit_rollouts(draw: Draw, file: h5py.File) -> None:
    names: list[str] = []
    file.visit(names.append)
    name = draw(st.sampled_from(names or ["/"]))
    action = draw(st.sampled_from(("drop", "array", "json", "attribute", "no attribute", "link",
                                   "group", "filter", "more")))  # fmt: skip
    # what HDF5 itself refuses to make cannot be met in a file
    with contextlib.suppress(KeyError, ValueError, TypeError, OSError, RuntimeError):
        if action == "attribute":
            place = file[name] if draw(st.booleans()) else file
            said = sorted(place.attrs) or ["x"]
            place.attrs[draw(st.sampled_from(said))] = draw(
                st.sampled_from((1, -1, "x", "", 2.5, "9" * 50)) | st.text(max_size=5)
            )
        elif action == "no attribute":
            place = file[name] if draw(st.booleans()) else file
            del place.attrs[draw(st.sampled_from(sorted(place.attrs)))]
        elif action == "more":
            file[f"{name}/x" if draw(st.booleans()) else "x"] = _array(draw)
        elif action == "json":
            texts = [n for n in names if isinstance(file[n], h5py.Dataset)
                     and file[n].dtype == np.uint8]  # fmt: skip
            name = draw(st.sampled_from(texts))
            said = draw(edited(json.loads(file[name][()].tobytes())))
            data = json.dumps(said).encode("utf-8", "surrogatepass")
            del file[name]
            file[name] = np.frombuffer(data, np.uint8)
        else:
            del file[name]
            if action == "array":
                file[name] = _array(draw)
            elif action == "group":
                file.create_group(name)
            elif action == "link":
                link = draw(st.sampled_from(("soft", "external", "self")))
                file[name] = (
                    h5py.ExternalLink("/etc/passwd", "/x")
                    if link == "external"
                    else h5py.SoftLink("/x" if link == "soft" else f"/{name}")
                )
            elif action == "filter":
                file.create_dataset(name, data=np.zeros(3, np.int64), compression="gzip")


@st.composite
def bundles(draw: Draw) -> bytes:
    """A bundle whose index, manifest or objects say other things, its digests as they should be."""
    key, manifest, whole, objects = good.run()
    said = json.loads(whole[bundle.BLOCK :].partition(b"\n")[0])
    what = draw(st.sampled_from(("index", "manifest", "object", "order", "bytes", "name")))
    if what == "bytes":
        return draw(mangled(whole))
    if what == "manifest":
        manifest = _line(draw(edited(json.loads(manifest))))
        said["runs"][0] |= {"sha256": _sha256(manifest), "size": len(manifest)}
    contents = dict(objects)
    if what == "object":
        name = draw(st.sampled_from(sorted(contents)))
        contents[name] = draw(mangled(contents[name]))
    if what == "index":
        said = draw(edited(said))
    members = [(f"runs/{key}/manifest.json", manifest)]
    members += [(f"objects/{name}", contents[name]) for name in sorted(contents)]
    if what == "order":
        random.Random(draw(st.integers(0, 99))).shuffle(members)
    if what == "name":
        at = draw(st.integers(0, len(members) - 1))
        odd = draw(st.sampled_from(("/etc/x", "../x", "runs/x", "x" * 90, "objects/" + "0" * 64)))
        members[at] = (odd, members[at][1])
    index = json.dumps(said, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    parts = []
    for name, data in ((bundle.INDEX, index), *members):
        parts += [bundle.header(name, len(data)), data, bundle.padding(len(data))]
    return b"".join(parts) + bundle.END


def _line(said: Any) -> bytes:
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ------------------------------------------------------------------------------ all of a reader

_OF: dict[str, Callable[[], st.SearchStrategy[bytes]]] = {
    "pt": lambda: saved_tensors() | npys(),
    "keydata": npys,
    "vendor": npys,
    "sketches": lambda: npzs(good.sketches()),
    "coordinates": lambda: npzs(good.coordinates()),
    "routing": lambda: npzs(good.routing()),
    "safetensors": safetensors,
    "records": parquets,
    "rollouts": rollouts,
    "bundle": bundles,
    "manifest": manifests,
}


def inputs(reader: str) -> st.SearchStrategy[bytes]:
    """Inputs of a reader that are nearly right."""
    if reader in good.yaml_values():
        structured: st.SearchStrategy[bytes] = yamls(reader)
    elif reader in _OF:
        structured = _OF[reader]()
    else:
        structured = documents(reader)
    raw = st.sampled_from(good.inputs(reader)).flatmap(mangled)
    return st.one_of(structured, structured, structured, raw)
