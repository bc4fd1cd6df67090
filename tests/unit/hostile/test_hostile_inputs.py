"""Is a file that somebody else made ever more than one sentence?

``corpus/`` holds inputs that once ended in a traceback, a hang or all memory, the first word of a
name saying what reads them. Each goes through the command that a user would give it to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.dumps.tensors.tensorfile import TensorFileError
from rlprobe.errors import ConfigError, RlprobeError
from tests.resealed import edited
from tests.unit.hostile.conftest import Aligned, Told, files, fit_for_a_terminal
from tests.unit.hostile.readers import READERS

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parent / "corpus"
DEEP = 5_000


def corpus(*kinds: str) -> list[pytest.ParameterSet]:
    found = [p for p in sorted(CORPUS.iterdir()) if p.name.partition("-")[0] in kinds]
    assert found
    return [pytest.param(path, id=path.name) for path in found]


#: Inputs of the corpus that are only long, or only odd: they are read, and do no harm.
HARMLESS = {"yaml-1-433.yaml", "dump-1-527.json", "manifest-1-643.bin"}
#: Files of which one record cannot be read: it is said, and the others are compared.
ONE_RECORD = {"dump-1-1618.json", "dump-99-48.json"}


@pytest.mark.parametrize("path", corpus("yaml", "laughs"))
def test_an_alignment_file(path: Path, root: Path, told: Told, monkeypatch, capsys) -> None:
    monkeypatch.chdir(root)
    if path.name in HARMLESS:
        assert main(["config", "check", str(path)]) == 0
        assert len(capsys.readouterr().out) < 2000
        return
    said = told("config", "check", path, code=(2,))
    assert path.name in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("path", corpus("collector", "msprobe"))
def test_a_collector_file(path: Path, tmp_path: Path, told: Told, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = told("exec", "--collector", path, "--", "false", code=(2,))
    assert path.name in said
    assert said.count("\n") == 1
    assert files(tmp_path) == {}


@pytest.mark.parametrize("path", corpus("rules"))
def test_a_rules_file(path: Path, aligned: Aligned, told: Told) -> None:
    run = aligned.run("target")
    said = told("compare", run, run, "-o", "out", "--rules", path, code=(2,))
    assert path.name in said
    assert said.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("path", corpus("dump"))
def test_a_dump(path: Path, tmp_path: Path, told: Told, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    stage = Path("dump/actor_update/step0/rank0")
    stage.mkdir(parents=True)
    shutil.copyfile(path, stage / "debug.json")
    if path.name in HARMLESS:
        assert main(["compare", "dump", "dump", "-o", "out"]) == 0
        return
    if path.name in ONE_RECORD:
        assert main(["compare", "dump", "dump", "-o", "out"]) in (0, 4)
        rows = pl.read_parquet("out/actor_update/records.parquet").filter(status="unreadable")
        assert rows.height == 1 and "surrogates not allowed" in rows.item(0, "reason")
        return
    before = files(tmp_path)
    said = told("compare", "dump", "dump", "-o", "out", code=(1,))
    assert "debug.json" in said
    assert {name for name in files(tmp_path) if "records" in name} == set()
    assert before.items() <= files(tmp_path).items()


@pytest.mark.parametrize("path", corpus("pt"))
def test_a_tensor_file_is_unreadable_on_its_record(path: Path, tmp_path: Path) -> None:
    stage = tmp_path / "dump/actor_update/step0/rank0"
    (stage / "dump_tensor_data").mkdir(parents=True)
    name = f"Module.a.Linear.forward.0.output.0{path.suffix}"
    shutil.copyfile(path, stage / "dump_tensor_data" / name)
    leaf: dict[str, object] = {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [3, 4],
        "data_name": name,
    }
    leaf |= {"Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 1.0, "requires_grad": False}
    call = {"input_args": [], "input_kwargs": {}, "output": [leaf]}
    data = {"task": "tensor", "level": "L0", "data": {"Module.a.Linear.forward.0": call}}
    (stage / "dump.json").write_text(json.dumps(data))
    for other in ("benchmark", "target"):
        shutil.copytree(tmp_path / "dump", tmp_path / other)
    out = tmp_path / "out"
    # nothing was compared, so the command does not say that all is well
    assert main(["compare", *map(str, (tmp_path / "benchmark", tmp_path / "target", "-o", out))])
    (table,) = out.rglob("records.parquet")
    found = pl.read_parquet(table)
    assert found["status"].to_list() == ["unreadable"]


@pytest.mark.parametrize("path", corpus("bundle"))
def test_a_bundle(path: Path, aligned: Aligned, told: Told) -> None:
    before = files(Path("store"))
    said = told("store", "import", path, "--store", "store", code=(1,))
    assert path.name in said
    assert said.count("\n") == 1
    new = files(Path("store")).items() - before.items()
    # whole objects may stay, for the next attempt, and go with the next gc; no run may
    assert {name.partition("/")[0] for name, _ in new} <= {"objects", "locks"}


@pytest.mark.parametrize("path", corpus("manifest"))
def test_a_manifest(path: Path, aligned: Aligned, told: Told) -> None:
    bad = aligned.run("target")
    shutil.copyfile(path, bad / "manifest.json")
    assert bad.name[:12] in told("store", "show", bad.name, "--store", "store", code=(1,))


@pytest.mark.parametrize("path", corpus("manifest"))
def test_a_bad_manifest_does_not_stop_store_ls(path: Path, aligned: Aligned, capsys) -> None:
    bad = aligned.run("target")
    shutil.copyfile(path, bad / "manifest.json")
    assert main(["store", "ls", "--store", "store"]) == 1
    said = capsys.readouterr()
    good = [line for line in said.out.splitlines() if "captured" in line or "stages" in line]
    assert sorted(line[:16] for line in good) == sorted(
        aligned.jobs.runs[role].key[:16] for role in ("benchmark", "repeat")
    )
    assert bad.name[:16] in said.out
    assert bad.name in said.err
    assert fit_for_a_terminal(said.out + said.err)


# ------------------------------------------------------------------------- relatives of each kind

YAML_RELATIVES = {
    "aliases in mappings": "a: &a {x: 1, y: 1, z: 1}\n"
    + "".join(
        f"{b}: &{b} {{p: *{a}, q: *{a}, r: *{a}, s: *{a}, t: *{a}}}\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "aliases merged": "a: &a {x: 1}\n"
    + "".join(
        f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 12)}]}}\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "aliases of a long text": f"a: &a '{'x' * 60_000}'\nb: [{', '.join(['*a'] * 10_000)}]",
    "an alias in itself": "a: &a [*a]",
    "aliases one below the other": "a0: &a0 [[[[[[[[1]]]]]]]]\n"
    + "".join(f"a{n}: &a{n} [[[[[[[[*a{n - 1}]]]]]]]]\n" for n in range(1, 400)),
    "flow mappings": "{a: " * DEEP,
    "block lists": "- " * DEEP + "x",
    "block mappings": "".join(" " * n + "a:\n" for n in range(400)),
    "digits": "a: " + "9" * DEEP,
    "negative digits": "a: [-" + "9" * 4_301 + "]",
    "digits with a tag": "a: !!int '" + "1" * 100_000 + "'",
    "digits in a directive": "%YAML " + "1" * DEEP + ".1\n---\na: 1",
    "a tag for a number": "a: !!float x",
    "a tag for a truth value": "a: !!bool perhaps",
    "a tag for null": "a: !!null 0",
    "a tag of another kind": "a: !!str [1]",
    "a tag of Python": "a: !!python/object/apply:os.system [false]",
    "a date that is none": "a: !!timestamp 2026-13-45",
    "half a pair": 'a: "\\ud800"',
    "half a pair as a key": '"\\udfff": 1',
    "a code point that is none": 'a: "\\UFFFFFFFF"',
    "many values": "- a\n" * 30_000,
    "a list as a key": "? [a]\n: b",
    "a NUL": "a: \x00",
    "an escape": "a: \x1b[31m",
    "two documents": "a: 1\n---\na: 2\n",
    "a key twice": "a: 1\na: 2\n",
}


@pytest.mark.parametrize("reader", ["yaml", "collector", "rules"])
@pytest.mark.parametrize("text", YAML_RELATIVES.values(), ids=YAML_RELATIVES.keys())
def test_relatives_in_yaml(reader: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as told:
        READERS[reader](path)
    assert "f.yaml" in str(told.value)
    # the key was given before, the first place where it is wrong, …
    assert "line" in str(told.value) or "character" in str(told.value)
    assert len(str(told.value)) < 400


JSON_RELATIVES = {
    "lists": "[" * DEEP,
    "mappings": '{"a":' * DEEP,
    "whole and too deep": '{"a":' + "[" * 500 + "]" * 500 + "}",
    "digits": '{"a": ' + "9" * DEEP + "}",
    "negative digits": '{"a": -' + "9" * 4_301 + "}",
    "digits in a list": '{"a": [' + "1" * 100_000 + "]}",
    "half a pair": '{"role": "\\ud800", "dump": 1}',
    "half a pair as a key": '{"\\uDFFF": 1}',
    "half a pair below": '{"a": [[{"b": "x\\udc00y"}]]}',
    "no number": '{"a": NaN}',
    "no end": '{"a": "',
    "a list": "[1, 2]",
    "a text": '"x"',
    "nothing": "",
}


@pytest.mark.parametrize(
    "reader", ["msprobe", "session", "manifest", "proof", "diagnosis", "plan", "summary"]
)
@pytest.mark.parametrize("text", JSON_RELATIVES.values(), ids=JSON_RELATIVES.keys())
def test_relatives_in_json(reader: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RlprobeError) as told:
        READERS[reader](path)
    assert len(str(told.value)) < 600


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe{\x00}\x00", "is UTF-16"),
        (b'{"a": "\xed\xa0\x80"}', r"byte \d+"),
        (b"\x80", r"byte \d+"),
    ],
)
@pytest.mark.parametrize("reader", ["yaml", "collector", "rules", "msprobe", "manifest"])
def test_bytes_that_are_no_text(reader: str, data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(data)
    with pytest.raises(RlprobeError, match=said):
        READERS[reader](path)


@pytest.mark.parametrize("reader", ["yaml", "collector", "rules", "msprobe"])
def test_a_device_without_an_end_is_not_read_to_its_end(reader: str) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        READERS[reader](Path("/dev/zero"))


NPY_RELATIVES = {
    "brackets": b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * DEEP,
    "a call": b"{'descr': '<f4', 'fortran_order': False, 'shape': (exit(),), }",
    "negative": b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
    "objects": b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "a structure": b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }",
    "a huge type": b"{'descr': '<f99', 'fortran_order': False, 'shape': (1,), }",
    "a huge shape": b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 18 + b",), }",
    "digits": b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * DEEP + b",), }",
    "many of nothing": b"{'descr': '<f4', 'fortran_order': False, 'shape': (999999999, 0), }",
    "axes": b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 70 + b"), }",
    "NUL": b"{'descr': '<f4\x00'",
    "nothing": b"",
}


@pytest.mark.parametrize("reader", ["pt", "keydata", "vendor"])
@pytest.mark.parametrize("text", NPY_RELATIVES.values(), ids=NPY_RELATIVES.keys())
def test_relatives_in_npy_headers(reader: str, text: bytes, tmp_path: Path) -> None:
    if reader == "pt" and text == NPY_RELATIVES["many of nothing"]:
        pytest.skip("an empty tensor of any shape costs nothing where no row is made of it")
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8))
    with pytest.raises((TensorFileError, RlprobeError)) as told:
        READERS[reader](path)
    assert len(str(told.value)) < 600


@pytest.mark.slow
def test_the_corpus_needs_little_memory_and_time(root: Path) -> None:
    """All of it in one process: 1 GiB more address space than after its imports, 200 MiB used."""
    done = subprocess.run(
        [sys.executable, "-c", _FRUGAL],
        env={**os.environ, "PYTHONPATH": f"{root}:{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = done.stdout.split()
    assert len(read) == len(list(CORPUS.iterdir()))


_FRUGAL = f"""
import resource, sys, tempfile, pathlib, shutil
import polars as pl
from rlprobe.dumps.tensors.tensorfile import TensorFileError
from rlprobe.errors import RlprobeError
from readers import READERS
pl.select(pl.arange(0, 1000).sum())
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30),) * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
place = pathlib.Path(tempfile.mkdtemp())
for path in sorted(pathlib.Path({str(CORPUS)!r}).iterdir()):
    copy = shutil.copy(path, place)
    try:
        READERS[path.name.partition("-")[0]](pathlib.Path(copy))
    except (RlprobeError, TensorFileError):
        pass
    print(path.name)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 200 << 10, grown
"""


# --------------------------------------------------------------------------- what a terminal obeys

OBEYED = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\r\x08\x7f"


def test_names_in_messages_are_shown_and_not_obeyed(tmp_path: Path, told: Told) -> None:
    said = told("verdict", tmp_path / OBEYED)
    assert "\\x1b]0;owned\\x07" in said
    assert "\\u202e" in said


def test_names_of_bytes_that_are_no_text_are_shown(tmp_path: Path, told: Told) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.yaml"))
    assert "\\udcff\\udcfe.yaml" in told("config", "check", path)


def test_wrong_usage_is_shown_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verdict", "x", f"--{OBEYED}"])
    assert "\x1b" not in capsys.readouterr().err


def test_data_on_stdout_is_shown_as_well(aligned: Aligned, capsys) -> None:
    with edited(aligned.results / "diagnosis.json") as found:
        found["sentence"] = f"aligned{OBEYED}"
    assert main(["verdict", str(aligned.results), "--json", "out.json"]) in (0, 3, 4)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert said.startswith("aligned")
    assert json.loads(Path("out.json").read_text())["sentence"] == found["sentence"]


def test_a_terminal_of_another_encoding_gets_what_it_can_show(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlprobe", "verdict", str(tmp_path / "é€漢.json")],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"\xe9\\u20ac\\u6f22.json" in done.stderr
