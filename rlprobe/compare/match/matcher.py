"""Which record of one side is which of the other, within one process.

Every record of both sides ends up in exactly one row. Records of the same name come first; what is
left is matched by rules (:mod:`rlprobe.compare.match.rules`), each on the leftovers of the one
before.
All of it is joins and sorts, n log n at worst, but for the alignment of calls that are shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from rlprobe.compare.match import arguments, calls, fusing, prefix, recompute, shift
from rlprobe.compare.match.pairs import Matches
from rlprobe.compare.match.rules import (
    CHUNKS,
    CLASS,
    COMMON_PREFIX,
    MAPPED,
    WRAPPERS,
    Rules,
)
from rlprobe.compare.match.state import State

#: What identifies a record on both sides once wrappers are out of its module path.
KEY = ("module", "op", "call", "direction", "slot", "index")


@dataclass(frozen=True)
class Matched:
    """The pairs, and both sides with the records that stand for several joined ones."""

    benchmark: pl.DataFrame
    target: pl.DataFrame
    matches: Matches


def match(benchmark: pl.DataFrame, target: pl.DataFrame, rules: Rules) -> Matched:
    """Pair the records of two processes.

    Both frames hold the columns of :data:`rlprobe.compare.match.pairs.LOADED`, in execution order.
    """
    right = _prepared(target)
    state = State(_prepared(benchmark), right if rules.mapping is None else _mapped(right, rules))
    state.by_mapping()
    _set_repetitions_aside(state)
    _rename(state, rules)
    _strip_prefix(state)
    calls.align_modules(state, benchmark, target)
    held = calls.uneven(state.left, state.right, shift.shifted(benchmark, target))
    aside = state.take_aside(held)
    state.by_name()
    state.join(KEY, WRAPPERS)
    state.join(("path", *KEY[1:]), WRAPPERS, label="renamed")
    state.join(("path", *KEY[2:]), CLASS)
    benchmark, target = fusing.fuse(state, benchmark, target, rules.fuses)
    state.put_back(aside)
    calls.by_counterparts(state, rules.functions)
    calls.by_order(state, benchmark, target, "forward")
    calls.by_forward(state)
    calls.by_order(state, benchmark, target, "backward")
    arguments.by_keyword(state, benchmark, target)
    return Matched(benchmark, target, state.finished())


def _prepared(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(
        "name",
        *KEY,
        "order",
        row=pl.int_range(pl.len(), dtype=pl.UInt32),
        # msprobe calls a keyword argument kwargs.x in one task and input.x in the other
        plain=pl.col("name").str.replace(".kwargs.", ".input.", literal=True),
        path=pl.lit(None, pl.String),
        renamed=pl.lit(None, pl.String),
        # by which rule its call has another number, and whether its name says nothing then
        renumbered=pl.lit(None, pl.String),
        moved=pl.lit(False),
        # the benchmark's name, by one of msprobe's mapping files
        mapped=pl.lit(None, pl.String),
    )


def _mapped(target: pl.DataFrame, rules: Rules) -> pl.DataFrame:
    """The target's records as a mapping file says that they are called on the benchmark."""
    mapping = rules.mapping
    assert mapping is not None
    names = target.get_column("name")
    if mapping.records or mapping.calls:
        found = [mapping.record(name) for name in names]
        return target.with_columns(
            mapped=pl.Series(found, dtype=pl.String).str.replace(
                ".kwargs.", ".input.", literal=True
            )
        )
    for function in mapping.functions:
        own = pl.col("module").is_null() & (pl.col("op") == function.target)
        if target.select(own.any()).item():
            mapping.used.add(function.target)
        index = pl.coalesce(
            pl.when(pl.col("slot") == slot).then(
                pl.col("index").replace_strict(indices, default=None, return_dtype=pl.String)
            )
            for slot, indices in function.indices.items()
            if indices
        )
        target = target.with_columns(
            mapped=pl.when(own & index.is_not_null())
            .then(
                pl.format(
                    "{}.{}.{}.{}.{}",
                    pl.lit(function.benchmark), "call", "direction", "slot", index,
                )
            )
            .otherwise("mapped")
        )  # fmt: skip
    modules = target.select("module", "op").drop_nulls("module").unique(maintain_order=True)
    classes = dict(modules.iter_rows())
    rows = [
        (path, kind, *new)
        for path, kind in modules.iter_rows()
        if (new := mapping.module(path, kind, classes)) is not None
    ]
    schema = {"module": pl.String, "op": pl.String, "new": pl.String, "kind": pl.String}
    table = pl.DataFrame(rows, schema=schema, orient="row")
    renamed = target.join(table, on=["module", "op"], how="left", maintain_order="left")
    changed = pl.col("new").is_not_null()
    return renamed.with_columns(
        module=pl.coalesce("new", "module"),
        op=pl.coalesce("kind", "op"),
        moved=pl.col("moved") | changed,
        renumbered=pl.when(changed).then(pl.lit(MAPPED)),
    ).drop("new", "kind")


def _set_repetitions_aside(state: State) -> None:
    """Where one side recomputes activations and the other does not, drop the repeated calls."""
    if not calls.uneven_modules(state.left, state.right):
        return
    again = [recompute.repeated(side) for side in (state.left, state.right)]
    if bool(again[0].any()) == bool(again[1].any()):
        return
    for name, side, repeated in (
        ("benchmark", "left", again[0]),
        ("target", "right", again[1]),
    ):
        frame: pl.DataFrame = getattr(state, side)
        state.set_single(name, frame.filter(repeated).get_column("row"), recompute.RECOMPUTE)
        setattr(state, side, calls.renumbered(frame.filter(~repeated), recompute.RECOMPUTE))


def _rename(state: State, rules: Rules) -> None:
    """Column ``path``: the module path as the rules rewrite it; ``renamed``: by which rule."""
    for name in ("left", "right"):
        side: pl.DataFrame = getattr(state, name)
        new = rewritten(side.get_column("module").drop_nulls().unique().to_list(), rules)
        table = pl.DataFrame(
            {
                "module": list(new),
                "path": [path for path, _ in new.values()],
                "renamed": [rule for _, rule in new.values()],
            },
            schema={"module": pl.String, "path": pl.String, "renamed": pl.String},
        )
        side = side.drop("path", "renamed").join(
            table, on="module", how="left", maintain_order="left"
        )
        setattr(state, name, side)


def _strip_prefix(state: State) -> None:
    """Take out of column ``path`` what every path begins with that one side alone has."""
    sides = state.left, state.right
    names = [side.get_column("path").drop_nulls().unique(maintain_order=True) for side in sides]
    alone = [
        one.filter(~one.is_in(other.implode())).to_list() for one, other in (names, reversed(names))
    ]
    found = prefix.common(*alone)
    if found is None:
        return
    stripped = []
    for side, paths, before in zip(sides, alone, found, strict=True):
        short = [prefix.without(path, before) for path in paths]
        table = pl.DataFrame(
            {"path": paths, "short": short}, schema={"path": pl.String, "short": pl.String}
        )
        joined = side.join(table, on="path", how="left", maintain_order="left")
        changed = pl.col("short").is_not_null() & (pl.col("short") != pl.col("path"))
        stripped.append(
            joined.with_columns(
                path=pl.coalesce("short", "path"),
                renamed=pl.when(changed).then(pl.lit(COMMON_PREFIX)).otherwise("renamed"),
            ).drop("short")
        )
    state.left, state.right = stripped


def rewritten(paths: Sequence[str], rules: Rules) -> dict[str, tuple[str, str | None]]:
    """Module paths as the rules spell them, and by which rule; None where none applied."""
    chunks = _consecutive(paths)
    found = {}
    for path in paths:
        new, rule = (chunks[path], CHUNKS) if path in chunks else (path, None)
        for rename in rules.renames:
            after = rename.apply(new)
            if after != new:
                rules.applied.add(rename.name)
                new, rule = after, rule or rename.name
        found[path] = new, rule
    return found


def _consecutive(paths: Sequence[str]) -> dict[str, str]:
    """Megatron's chunks ``0.decoder.layers.0``, ``1.decoder.layers.0`` with layers numbered on.

    Right where chunks follow one another on this rank, which they do without pipeline parallelism.
    """
    layers: dict[int, int] = {}
    found: dict[str, tuple[int, str]] = {}
    for path in paths:
        chunk, _, rest = path.partition(".")
        if chunk.isdecimal() and rest:
            found[path] = int(chunk), rest
            number = fusing.layer_number(rest)
            if number is not None:
                layers[int(chunk)] = max(layers.get(int(chunk), 0), number + 1)
    first = {chunk: sum(n for c, n in layers.items() if c < chunk) for chunk in range(len(layers))}
    return {
        path: fusing.with_layer_added(rest, first.get(chunk, 0))
        for path, (chunk, rest) in found.items()
    }
