"""Columns of one Parquet file copied into another: the same values, and nothing that is no file."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.documents import parquetfile, thrift
from rlprobe.documents.parquetfile import Copied

SCHEMA: dict[str, Any] = {
    "text": pl.String,
    "few": pl.String,
    "nothing": pl.String,
    "shape": pl.List(pl.Int64),
    "number": pl.Float64,
    "flag": pl.Boolean,
    "order": pl.Int32,
}


def table(rows: int, seed: int = 0) -> pl.DataFrame:
    rng = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.2 else value

    return pl.DataFrame(
        {
            "text": [maybe(f"名 {rng.random()}" * rng.randint(0, 3)) for _ in range(rows)],
            "few": [maybe(rng.choice("abc")) for _ in range(rows)],
            "nothing": [None] * rows,
            "shape": [maybe([rng.randint(0, 9)] * rng.randint(0, 3)) for _ in range(rows)],
            "number": [maybe(rng.choice([0.0, -0.0, 5e-324, 1e308, 0.1])) for _ in range(rows)],
            "flag": [maybe(rng.random() < 0.5) for _ in range(rows)],
            "order": list(range(rows)),
        },
        schema=SCHEMA,
    ).with_columns(pl.col("number") / pl.Series([float(n % 7) for n in range(rows)]))


def written(frame: pl.DataFrame, **how: Any) -> io.BytesIO:
    file = io.BytesIO()
    frame.write_parquet(file, **how)
    return file


def joined(source: pl.DataFrame, taken: dict[str, str], size: int, **how: Any) -> pl.DataFrame:
    """A table made of a file's columns (column made -> column taken) and of what it adds."""
    file = written(source, row_group_size=size, **how)
    found = parquetfile.layout(file)
    schema = {**{made: SCHEMA[own] for made, own in taken.items()}, "error": pl.Float64}
    empty = parquetfile.empty(schema, {"rlprobe": "here"})
    groups = range(len(found.groups))
    assert all(parquetfile.alike(found, own, empty, made) for made, own in taken.items())
    copied = {made: Copied(file, found, own, groups) for made, own in taken.items()}
    out = io.BytesIO()
    writer = parquetfile.Writer(out, empty, schema, copied)
    for start in range(0, source.height, size):
        rows = source.slice(start, size)
        writer.add(rows.select(error=pl.col("order") / 3))
    writer.finish()
    out.seek(0)
    assert pl.read_parquet_metadata(out)["rlprobe"] == "here"
    out.seek(0)
    return pl.read_parquet(out)


@pytest.mark.parametrize("compression", ["lz4", "zstd", "snappy", "uncompressed"])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (100, 100), (1000, 300), (4001, 1000)])
def test_what_is_copied_is_what_stood_there(compression: str, rows: int, size: int) -> None:
    source = table(rows)
    taken = {f"{name}_{side}": name for name in SCHEMA for side in ("benchmark", "target")}
    made = joined(source, taken, size, compression=compression)
    wanted = source.select(
        *(pl.col(own).alias(name) for name, own in taken.items()), error=pl.col("order") / 3
    )
    assert made.schema == wanted.schema
    assert made.equals(wanted)


def test_of_two_files_each_column_is_its_own() -> None:
    sides = [table(900, seed) for seed in (1, 2)]
    files = [
        written(frame, row_group_size=400, statistics=flag)
        for frame, flag in zip(sides, (True, False), strict=True)
    ]
    layouts = [parquetfile.layout(file) for file in files]
    schema = {"number": pl.Float64, "text_b": pl.String, "text_t": pl.String}
    empty = parquetfile.empty(schema, {})
    copied = {
        name: Copied(files[at], layouts[at], "text", range(1, 3))
        for at, name in enumerate(("text_b", "text_t"))
    }
    out = io.BytesIO()
    writer = parquetfile.Writer(out, empty, schema, copied)
    for start, length in ((400, 400), (800, 100)):
        writer.add(sides[0].slice(start, length))
    writer.finish()
    out.seek(0)
    assert pl.read_parquet(out).equals(
        sides[0]
        .slice(400)
        .select("number", text_b="text", text_t=sides[1].get_column("text").slice(400))
    )
    # and lazily, a column and some rows of it
    out.seek(0)
    some = pl.scan_parquet(out).slice(390, 20).select("text_t").collect()
    assert some.get_column("text_t").equals(sides[1].get_column("text").slice(790, 20))


def test_another_type_is_not_alike() -> None:
    frame = table(10)
    found = parquetfile.layout(written(frame.with_columns(pl.col("order").cast(pl.Int64))))
    empty = parquetfile.empty(SCHEMA, {})
    assert parquetfile.alike(found, "text", empty, "few")
    assert not parquetfile.alike(found, "order", empty, "order")
    assert not parquetfile.alike(found, "text", empty, "shape")
    assert not parquetfile.alike(found, "gone", empty, "text")
    nested = pl.DataFrame({"pair": [{"a": 1, "b": 2}]})
    found = parquetfile.layout(written(nested))
    # two chunks in each row group
    assert not parquetfile.alike(found, "pair", parquetfile.empty(nested.schema, {}), "pair")


def test_another_number_of_rows_is_refused() -> None:
    file = written(table(10))
    found = parquetfile.layout(file)
    schema = {"text": pl.String, "order": pl.Int32}
    empty = parquetfile.empty(schema, {})
    copied = {"text": Copied(file, found, "text", range(1))}
    writer = parquetfile.Writer(io.BytesIO(), empty, schema, copied)
    with pytest.raises(ValueError, match="10 rows of text are copied beside 9"):
        writer.add(table(9))


def test_what_was_cut_short_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    table(10).write_parquet(path)
    schema = {"text": pl.String, "order": pl.Int32}
    with path.open("r+b") as file:
        found = parquetfile.layout(file)
        file.truncate(20)
        copied = {"text": Copied(file, found, "text", range(1))}
        writer = parquetfile.Writer(io.BytesIO(), parquetfile.empty(schema, {}), schema, copied)
        with pytest.raises(OSError, match=r"cut short while it was copied: '.*table\.parquet'"):
            writer.add(table(10))


def test_columns_are_told_to_be_equal_by_their_bytes() -> None:
    def column(frame: pl.DataFrame, name: str = "text", **how: Any) -> Copied:
        file = written(frame, **{"row_group_size": 30, "compression": "lz4", **how})
        found = parquetfile.layout(file)
        return Copied(file, found, name, range(len(found.groups)))

    mine, other = table(100), table(100)
    one = column(mine)
    assert parquetfile.equal(one, column(other.drop("order")))
    assert parquetfile.equal(column(mine, "few"), column(mine.rename({"few": "many"}), "many"))
    # what is equal may look otherwise; nothing is known of it then
    assert not parquetfile.equal(one, column(mine, compression="zstd"))
    assert not parquetfile.equal(one, column(mine, row_group_size=50))
    assert not parquetfile.equal(one, column(mine, "few"))
    assert not parquetfile.equal(one, column(mine.with_columns(text=pl.lit(1)), "text"))
    for row in range(0, 100, 7):
        changed = mine.with_row_index().with_columns(
            text=pl.when(pl.col("index") == row).then(pl.lit("?")).otherwise("text")
        )
        assert not parquetfile.equal(one, column(changed.select(*SCHEMA)))
        assert not parquetfile.equal(one, column(mine.head(row + 1)))


def test_footers_are_encoded_as_they_were() -> None:
    for frame in (table(1000), table(0), pl.DataFrame({"a": [[{"b": [1.5]}]], "c": ["x"]})):
        data = written(frame, row_group_size=100, metadata={"k": "v" * 300}).getvalue()
        length = int.from_bytes(data[-8:-4], "little")
        footer = data[-8 - length : -8]
        assert thrift.encoded(thrift.decoded(footer)) == footer
    whole = {
        1: (thrift.TRUE, True),
        2: (thrift.FALSE, False),
        40: (thrift.I64, -(2**63)),
        41: (thrift.I32, 2**31 - 1),
        42: (thrift.DOUBLE, -0.1),
        43: (thrift.BYTE, 200),
        44: (thrift.LIST, (thrift.TRUE, [True, False] * 20)),
        45: (thrift.SET, (thrift.BINARY, [b"", b"\xff" * 200])),
        46: (thrift.STRUCT, {}),
    }
    assert thrift.decoded(thrift.encoded(whole)) == whole


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cut short"),
        (b"\x15", "cut short"),
        (b"\x18\x7fabc", "cut short"),
        (b"\x16" + b"\xff" * 12, "more than 64 bits"),
        (b"\x19\xf5" + b"\xff" * 9 + b"\x01", "cut short|64 bits"),
        (b"\x1d\x00", "type 13"),
        (b"\x1c" * 100_000, "type 12"),
        (b"\x19" * 100_000, "type 9"),
    ],
)
def test_what_is_no_struct_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        thrift.decoded(data)


def test_columns_that_go_by_another_name_are_refused() -> None:
    """Readers go by the order of columns or by their names: in what is copied the two agree."""
    data = written(table(10)).getvalue()
    length = int.from_bytes(data[-8:-4], "little")
    for wrong in (lambda c: c.reverse(), lambda c: c.pop()):
        footer = thrift.decoded(data[-8 - length : -8])
        wrong(footer[4][1][1][0][1][1][1])
        changed = thrift.encoded(footer)
        tail = changed + len(changed).to_bytes(4, "little") + b"PAR1"
        with pytest.raises(ValueError, match=r"another order|shorter"):
            parquetfile.layout(io.BytesIO(data[: -8 - length] + tail))


def test_a_damaged_file_has_a_layout_or_none() -> None:
    data = written(table(50), row_group_size=20).getvalue()
    rng = random.Random(3)
    refused = 0
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[-rng.randint(1, 1500)] = rng.randrange(256)
        try:
            found = parquetfile.layout(io.BytesIO(changed))
        except ValueError:
            refused += 1
            continue
        for group in found.groups:
            for chunk in group.chunks.values():
                assert 0 < chunk.start <= chunk.start + chunk.length <= len(data)
    assert refused > 100
    for length in (0, 3, 8, 12, len(data) - 1):
        with pytest.raises(ValueError, match=r"Parquet|struct"):
            parquetfile.layout(io.BytesIO(data[:length]))
