"""``rlprobe store``: list, show, verify, clean, export, import and lay out runs."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlprobe.cli.common import given_path, write_json
from rlprobe.errors import StoreError, UsageError
from rlprobe.terminal import counted

_log = logging.getLogger("rlprobe.store")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("store", help="look into, check and clean the store")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
        added.add_argument(
            "--store",
            type=given_path,
            default=Path("store"),
            help="the store's directory (./store)",
        )
        return added

    action("ls", "list the runs of a store")
    show = action("show", "what a run is: declared, recorded, captured; or why two keys differ")
    show.add_argument("run", metavar="KEY", help="a run's key, or the beginning of it")
    show.add_argument("other", metavar="KEY", nargs="?", help="another run: what differs is shown")
    verify = action("verify", "read every byte and compare digests; exit 1 when one is wrong")
    verify.add_argument("runs", metavar="KEY", nargs="*", help="only these runs")
    verify.add_argument(
        "--repair",
        action="store_true",
        help="bring back what is damaged or missing, from copies, other runs, and --from",
    )
    verify.add_argument(
        "--from",
        dest="sources",
        type=given_path,
        action="append",
        default=[],
        metavar="FILE",
        help="a bundle, or another store, to repair from; may be repeated",
    )
    drop = action("rm", "delete one run, and the objects that no other run has")
    drop.add_argument("run", metavar="KEY")
    drop.add_argument(
        "--force", action="store_true", help="also where other runs were replayed from it"
    )
    clean = action("gc", "delete every run and object that no recorded alignment reaches")
    clean.add_argument("--dry-run", action="store_true", help="only say what would go")
    clean.add_argument("--forget", metavar="NAME", help="drop this alignment's record first")
    clean.add_argument(
        "--all", action="store_true", help="go on where no alignment is recorded: all runs go"
    )
    clean.add_argument(
        "--no-lock",
        action="store_true",
        help="where the file system has no locks, and nothing else uses the store",
    )
    clean.add_argument(
        "--wait",
        type=float,
        nargs="?",
        const=None,
        default=0.0,
        metavar="SECONDS",
        help="wait for commits, imports and exports to end: so long, or as long as it takes",
    )
    export = action("export", "write runs into one file to be carried elsewhere; can be resumed")
    export.add_argument("runs", metavar="KEY", nargs="*", help="runs' keys")
    export.add_argument("--alignment", metavar="NAME", help="the runs of this alignment")
    export.add_argument("-o", "--output", type=given_path, required=True, metavar="FILE")
    bring = action("import", "bring the runs of an exported file into the store, all checked")
    bring.add_argument("file", type=given_path, metavar="FILE")
    bring.add_argument("--digest", help="sha256:… of the file, as export printed it")
    bring.add_argument(
        "--replace", action="store_true", help="instead of other runs with the same keys"
    )
    tree = action("tree", "lay a run's dump out as plain files, for msprobe by hand")
    tree.add_argument("run", metavar="KEY")
    tree.add_argument(
        "output",
        type=given_path,
        metavar="DIR",
        help="a new directory, or an empty one",
    )
    tree.add_argument(
        "--copy", action="store_true", help="copies; by default links, which are read-only"
    )
    tree.add_argument(
        "--guide",
        action="store_true",
        help="key data under the names of the vendor's guide: responses/…/response0.npy",
    )


def run(args: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace], tuple[int, Any]]] = {
        "ls": _ls,
        "show": _show,
        "verify": _verify,
        "rm": _rm,
        "gc": _gc,
        "export": _export,
        "import": _import,
        "tree": _tree,
    }
    if args.action != "import":
        from rlprobe.store import read

        read.require(args.store)
    code, result = actions[args.action](args)
    if args.json is not None:
        write_json(args.json, result)
    return code


def _ls(args: argparse.Namespace) -> tuple[int, Any]:
    from rlprobe.store import alignments, attempts, read

    named: dict[str, list[str]] = {}
    damaged = 0
    for path in alignments.paths(args.store):
        try:
            for key in alignments.load(path).keys:
                named.setdefault(key, []).append(path.stem)
        except StoreError as error:
            damaged += 1
            _log.warning("%s", error)
    rows = []
    for key in read.keys(args.store, complete=False):
        try:
            run = read.Run.open(args.store, key)
        except StoreError as error:
            # one that cannot be read must not hide the others
            damaged += 1
            _log.warning("%s", error)
            print(f"{key[:16]}  cannot be read; `rlprobe store verify` says how to mend it")
            continue
        manifest = run.manifest
        row: dict[str, Any] = {
            "key": run.key,
            "role": manifest.role,
            "framework": manifest.declared.get("framework"),
            "device": manifest.declared.get("device"),
            "steps": manifest.steps,
            "stages": {name: stage.state for name, stage in manifest.stages.items()},
            "bytes": sum(file.size for file in manifest.files),
            "alignments": named.get(run.key, []),
        }
        rows.append(row)
        captured = sum(stage.state == "captured" for stage in manifest.stages.values())
        print(
            f"{run.key[:16]}  {manifest.role:<14}  {row['framework'] or '-'} on "
            f"{row['device'] or '-'}  steps {_range(manifest.steps)}  "
            f"{counted(captured, 'stage')}  "
            f"{_size(row['bytes'])}  {', '.join(row['alignments']) or 'kept by no alignment'}"
        )
    # one that was killed outright has said nothing
    left = attempts.every(args.store)
    if left:
        _log.info(
            "%s in %s, under way or left by what failed or was killed: `rlprobe store gc` removes "
            "those that nobody is at work on, the next attempt at the same run its own",
            counted(len(left), "attempt"),
            left[0].parent,
        )
    return int(damaged > 0), rows


def _show(args: argparse.Namespace) -> tuple[int, Any]:
    from rlprobe.store.read import Run

    if args.other is not None:
        return _differing(args)
    manifest = Run.open(args.store, args.run).manifest
    print(f"{manifest.key}\nrole {manifest.role}, trainer's first step {manifest.first_step}")
    for parent in manifest.parents:
        print(f"replays {parent}")
    for name, stage in manifest.stages.items():
        detail = f"{counted(stage.records, 'record')}, ranks {_range(stage.ranks)}, " * bool(
            stage.records
        )
        print(f"{name:<28} {stage.state:<9} {detail}steps {_range(stage.steps)}")
    print("declared:")
    for key, value in sorted(manifest.declared.items()):
        print(f"  {key}: {value}")
    print(
        f"{counted(len(manifest.files), 'file')}, "
        f"{_size(sum(file.size for file in manifest.files))}"
    )
    return 0, manifest.model_dump(mode="json")


def _differing(args: argparse.Namespace) -> tuple[int, Any]:
    """What two runs declare otherwise: why their keys differ."""
    from rlprobe.store.keys import differing
    from rlprobe.store.read import Run

    first, second = (Run.open(args.store, key).manifest for key in (args.run, args.other))
    found = differing(first.declared, second.declared)
    for name, (one, other) in found.items():
        print(f"{name}: {_declared(one)} -> {_declared(other)}")
    if not found:
        print("the same key: nothing declared differs")
    return 0, {
        "keys": [first.key, second.key],
        "differ": {name: list(values) for name, values in found.items()},
    }


def _declared(value: Any) -> str:
    return "(absent)" if value is None else str(value)


def _verify(args: argparse.Namespace) -> tuple[int, Any]:
    from rlprobe.store import verify
    from rlprobe.store.repair import repair

    mended: list[str] = []
    if args.repair:
        if args.runs:
            raise UsageError("--repair mends the whole store; name no run")
        done = repair(args.store, args.sources)
        found, mended = done.now, done.mended
    else:
        if args.sources:
            raise UsageError("--from says what to repair from; add --repair")
        found = verify.verify(args.store, args.runs)
    for line in mended:
        print(f"mended: {line}")
    for problem in found.problems:
        print(problem)
    for note in found.notes:
        print(f"note: {note}")
    if found.unchecked:
        print(
            f"note: {counted(len(found.unchecked), 'file')} made by an earlier version, of which "
            f"nothing shows a change ({found.unchecked[0]}); `rlprobe store verify --repair "
            f"--store {shlex.quote(str(args.store))}` adds seals"
        )
    state = counted(len(found.problems), "problem") if found.problems else "all as they should be"
    print(
        f"{counted(found.runs, 'run')}, {counted(found.objects, 'object')}, "
        f"{_size(found.bytes)}: {state}"
    )
    return int(bool(found.problems)), {
        **dataclasses.asdict(found),
        "problems": [problem.as_dict() for problem in found.problems],
        "unchecked": [str(path) for path in found.unchecked],
        "mended": mended,
    }


def _rm(args: argparse.Namespace) -> tuple[int, Any]:
    from rlprobe.store.gc import remove

    found = remove(args.store, args.run, force=args.force)
    print(f"deleted run {found.runs[0]}, {counted(found.objects, 'object')}, {_size(found.bytes)}")
    return 0, dataclasses.asdict(found)


def _gc(args: argparse.Namespace) -> tuple[int, Any]:
    from rlprobe.store.alignments import forget_alignment
    from rlprobe.store.gc import collect

    if args.forget is not None:
        if args.dry_run:
            raise UsageError("--forget changes the store; it makes no sense with --dry-run")
        forget_alignment(args.store, args.forget)
    found = collect(
        args.store,
        dry_run=args.dry_run,
        everything=args.all,
        lock=not args.no_lock,
        wait=args.wait,
    )
    for key in found.runs:
        print(key)
    print(
        f"{'would delete' if args.dry_run else 'deleted'} {counted(len(found.runs), 'run')}, "
        f"{counted(found.objects, 'object')}, {_size(found.bytes)}; kept "
        f"{counted(found.kept_runs, 'run')}"
    )
    if found.attempts:
        print(
            f"{'and' if args.dry_run else 'also'} what failed or killed attempts at "
            f"{counted(len(found.attempts), 'run')} left, {_size(found.attempts_bytes)}"
        )
    for name in found.uncommitted:
        print(
            f"scratch/{name} ran to its end and is not committed: `rlprobe run` commits it, "
            "`rlprobe run --force` makes it anew"
        )
    return 0, dataclasses.asdict(found)


def _export(args: argparse.Namespace) -> tuple[int, Any]:
    from rlprobe.store import exporting, read
    from rlprobe.store.alignments import alignments

    runs = list(args.runs)
    if args.alignment is not None:
        recorded = alignments(args.store)
        if args.alignment not in recorded:
            raise UsageError(
                f"{args.store} records no alignment {args.alignment!r}; it has "
                f"{', '.join(sorted(recorded)) or 'none'}"
            )
        have = set(read.keys(args.store))
        runs += [key for key in recorded[args.alignment] if key in have]
    if not runs:
        raise UsageError("say which runs: their keys, or --alignment NAME with runs in the store")
    done = exporting.export(args.store, runs, args.output)
    print(f"{done.path}  {counted(len(done.index.runs), 'run')}, {_size(done.size)}")
    print(f"sha256:{done.sha256}")
    return 0, exporting.describe(done)


def _import(args: argparse.Namespace) -> tuple[int, Any]:
    from rlprobe.store.importing import import_bundle

    done = import_bundle(args.store, args.file, digest=args.digest, replace=args.replace)
    for key in done.keys:
        print(key)
    print(
        f"{done.new_runs} of {counted(len(done.keys), 'run')} "
        f"{'is' if done.new_runs == 1 else 'are'} new, "
        f"{_size(done.new_bytes)}; kept as "
        f"{done.alignment} (`rlprobe store gc --forget {done.alignment} "
        f"--store {shlex.quote(str(args.store))}` lets them go)"
    )
    return 0, dataclasses.asdict(done)


def _tree(args: argparse.Namespace) -> tuple[int, Any]:
    from rlprobe.store.read import Run
    from rlprobe.store.tree import lay_out

    found = Run.open(args.store, args.run)
    count = lay_out(found, args.output, copy=args.copy, guide=args.guide)
    print(f"{args.output}: {counted(count, 'file')} of run {found.key[:16]}")
    return 0, {"key": found.key, "directory": str(args.output), "files": count}


def _range(numbers: list[int]) -> str:
    """``0-3,7``, for numbers in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
