"""Does this checkout judge as another one does?

    python tests/equality.py OLD_CHECKOUT [--results DIR]… [--corpus DIR] [--compare]

The corpus is every alignment that tests/unit/diagnose builds (made by the tests themselves, with
this checkout, below DIR or a temporary directory), and every alignment found below the given
results directories (a relative path of a store is looked for from where this runs; judged tables
are written there). Both checkouts judge each of them in one process; what differs in
``diagnosis.json`` is printed and the exit code is 1. ``NEW`` lists what may differ: keys that the
other checkout does not write, and words added to the sentence. With ``--compare`` both also compare
the runs of each alignment anew, and every file that a comparison writes must be the same to the
byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Keys that one of the two checkouts may lack; the number of the format.
NEW = ("format", "extent", "judged", "of", "digest", "curves", "cause.known", "cause.statement")
#: What follows the verdict in a sentence since the extent is said.
_EXTENT = re.compile(r" Judged: [\d,]+ of [\d,]+ recorded quantities\.$")

#: Judges the directories on stdin, one a line, and prints a JSON line for each.
_JUDGE = """
import json, sys
from pathlib import Path
import rlprobe
print(Path(rlprobe.__file__).parents[1], file=sys.stderr)
from rlprobe.diagnose.run import diagnose
from rlprobe.errors import RlprobeError
for line in sys.stdin:
    try:
        found = diagnose(Path(line.strip())).as_dict()
    except RlprobeError as error:
        found = {"error": type(error).__name__ + ": " + str(error)}
    print(json.dumps(found), flush=True)
"""

#: Compares the runs of the alignments on stdin anew, a line each: where, and where to.
_COMPARE = """
import json, sys
from pathlib import Path
from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.errors import RlprobeError
for line in sys.stdin:
    directory, out = map(Path, json.loads(line))
    plan = json.loads((directory / "alignment.json").read_bytes())
    for name, pair in plan["pairs"].items():
        try:
            both = [sides.resolve(str(Path(plan["store"]) / "runs" / plan["runs"][role]["key"]))
                    for role in (pair["benchmark"], pair["target"])]
            compare(*both, out / name, Options(name, tuple(pair["stages"])))
        except RlprobeError as error:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.error").write_text(f"{type(error).__name__}: {error}")
    print(out, flush=True)
"""


def corpus(directory: Path) -> None:
    """Let the tests of the diagnosis build their alignments, and keep them."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={directory}",
        "-o", "tmp_path_retention_policy=all", "tests/unit/diagnose",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=_environment(ROOT), check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests could not be run ({done.returncode})")


def alignments(*roots: Path) -> list[Path]:
    """Directories with a plan and comparisons."""
    found = {path.parent for root in roots for path in root.rglob("alignment.json")}
    return sorted(path for path in found if (path / "compare").is_dir())


def judged(checkout: Path, directories: list[Path]) -> list[dict[str, Any]]:
    """What a checkout says of each directory."""
    lines = "".join(f"{directory}\n" for directory in directories)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _JUDGE], input=lines, text=True, stdout=subprocess.PIPE,
        env=_environment(checkout), check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def tables(checkout: Path, directories: list[Path], out: Path) -> list[dict[str, str]]:
    """Digests of what a checkout's comparison of each directory's runs leaves, by file."""
    places = [out / str(number) for number in range(len(directories))]
    lines = "".join(
        json.dumps([str(directory), str(place)]) + "\n"
        for directory, place in zip(directories, places, strict=True)
    )
    subprocess.run(
        [sys.executable, "-P", "-c", _COMPARE], input=lines, text=True, stdout=subprocess.DEVNULL,
        env=_environment(checkout), check=True,
    )  # fmt: skip
    return [
        {
            str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(place.rglob("*"))
            if file.is_file()
        }
        for place in places
    ]


def compared(old: Path, found: list[Path], temporary: Path) -> int:
    """How many comparisons leave other files than before; each is printed."""
    before = tables(old, found, temporary / "old")
    after = tables(ROOT, found, temporary / "new")
    differ = 0
    for path, one, other in zip(found, before, after, strict=True):
        changed = sorted(
            name for name in one.keys() | other.keys() if one.get(name) != other.get(name)
        )
        differ += bool(changed)
        for name in changed:
            print(f"{path}: {name} is another file")
    print(f"{sum(map(len, after))} files of {len(found)} comparisons, {differ} compared otherwise")
    return differ


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


def differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """Places at which two diagnoses differ, and both values; the new keys apart."""
    if at in NEW:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{at}.{key}" if at else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{at}[{index}]")
    else:
        if at == "sentence" and isinstance(new, str) and not _EXTENT.search(str(old)):
            new = _EXTENT.sub("", new)  # an older checkout does not say it
        if old != new:
            yield f"{at}: {old!r} -> {new!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("--results", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="taken as it is if it is there")
    parser.add_argument("--compare", action="store_true", help="compare the runs anew as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.corpus or Path(temporary) / "corpus"
        if not directory.exists():
            corpus(directory)
        found = alignments(directory, *args.results)
        old, new = judged(args.old, found), judged(ROOT, found)
        tables_differ = compared(args.old, found, Path(temporary)) if args.compare else 0
    verdicts: dict[str, int] = {}
    differ = 0
    for path, one, other in zip(found, old, new, strict=True):
        verdict = str(one.get("verdict", "error"))
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        lines = list(differences(one, other))
        differ += bool(lines)
        for line in lines:
            print(f"{path}: {line}")
    said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    print(f"{len(found)} alignments ({said}), {differ} of them judged otherwise")
    return 1 if differ or tables_differ or not found else 0


if __name__ == "__main__":
    raise SystemExit(main())
