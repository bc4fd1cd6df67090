"""Names in dump.json and debug.json, taken apart: module, operator, call and direction.

Formats (msprobe 26.2): ``Module.{path}.{Class}.forward.{call}``, ``….backward.{call}``,
``….parameters_grad[.{call}]``, ``{Kind}.{api}.{call}.forward`` and ``{name}.{call}.debug``; own
debug names are ``{parameter}.{grad|grad_reduced|grad_clipped|change}.{call}.debug`` and
``loss.{part}.{call}.debug``. Everything is vectorised over the names of one file.
"""

from __future__ import annotations

import polars as pl

from rlprobe.logical.wrappers import normalise_class, normalise_path

#: Between the names of the parts of a joined record, as msprobe has it.
SEPARATOR = "; "
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
#: Slots of debug records that belong to a parameter.
PARAMETER_SLOTS = ("grad", "grad_reduced", "grad_clipped", "change")
_DIRECTIONS = (FORWARD, BACKWARD)
_PARAMETERS_GRAD = "parameters_grad"
#: What a name is taken apart into.
_PARSED: dict[str, pl.DataType | type[pl.DataType]] = {
    "module": pl.String,
    "op": pl.String,
    "call": pl.Int32,
    "direction": pl.String,
    "debug_slot": pl.String,
    "debug_index": pl.String,
}


def parse(names: pl.Series) -> pl.DataFrame:
    """One row per name: module, op, call, direction, debug_slot, debug_index.

    ``module`` is null for functional calls and saved values, ``""`` for the root module;
    ``debug_slot`` and ``debug_index`` are null outside debug.json.
    """
    if (
        names.is_empty()
    ):  # before 2.1 polars takes a part of a list in no rows for a list of nothing
        return pl.DataFrame(schema=_PARSED)
    parts = pl.col("parts")
    last, second = parts.list.get(-1, null_on_oob=True), parts.list.get(-2, null_on_oob=True)
    third = parts.list.get(-3, null_on_oob=True)
    frame = names.alias("name").to_frame().with_columns(parts=pl.col("name").str.split("."))
    frame = frame.with_columns(last=last, second=second, third=third).with_columns(
        form=pl.when(pl.col("last") == "debug")
        .then(pl.lit("debug"))
        .when(pl.col("last").is_in(_DIRECTIONS))
        .then(pl.lit("api"))
        .when(pl.col("second").is_in((*_DIRECTIONS, _PARAMETERS_GRAD)))
        .then(pl.lit("module"))
        .when(pl.col("last") == _PARAMETERS_GRAD)
        .then(pl.lit("old_grad"))
        .otherwise(pl.lit("other")),
    )
    form = pl.col("form")
    # The number of trailing components that are not part of the name proper.
    tail = (
        pl.when(form.is_in(("debug", "api", "module")))
        .then(2)
        .when(form == "old_grad")
        .then(1)
        .otherwise(0)
    )
    frame = frame.with_columns(
        head=parts.list.head(parts.list.len().cast(pl.Int64) - tail),
        call=pl.when(form == "module")
        .then(pl.col("last"))
        .when(form.is_in(("debug", "api")))
        .then(pl.col("second"))
        .cast(pl.Int32, strict=False),
        direction=pl.when(form == "api")
        .then(pl.col("last"))
        .when(pl.col("second").is_in(_DIRECTIONS) & (form == "module"))
        .then(pl.col("second"))
        .when(form.is_in(("module", "old_grad")))
        .then(pl.lit(BACKWARD))
        .otherwise(pl.lit(FORWARD)),
    )
    head = pl.col("head")
    is_module = (head.list.get(0, null_on_oob=True).is_in(("Module", "Cell"))) & form.is_in(
        ("module", "old_grad")
    )
    is_parameter = (form == "debug") & pl.col("third").is_in(PARAMETER_SLOTS)
    is_loss = (form == "debug") & (head.list.get(0, null_on_oob=True) == "loss") & ~is_parameter
    inner = head.list.slice(1, head.list.len().cast(pl.Int64) - 2)
    frame = frame.select(
        "name",
        "call",
        form,
        path=pl.when(is_module)
        .then(inner.list.join("."))
        .when(is_parameter)
        .then(head.list.head(head.list.len().cast(pl.Int64) - 1).list.join(".")),
        direction=pl.when(is_parameter).then(pl.lit(UPDATE)).otherwise(pl.col("direction")),
        op=pl.when(is_module)
        .then(head.list.get(-1, null_on_oob=True))
        .when(is_parameter)
        .then(pl.lit("Parameter"))
        .when(is_loss)
        .then(pl.lit("loss"))
        .when(form == "debug")
        .then(pl.lit("save.") + head.list.join("."))
        .otherwise(head.list.join(".")),
        debug_slot=pl.when(is_parameter).then(pl.col("third")).when(is_loss).then(pl.lit("loss")),
        debug_index=pl.when(is_loss).then(head.list.slice(1).list.join(".")),
        parameter=is_parameter,
    )
    return _normalised(frame).select(*_PARSED)


def _normalised(frame: pl.DataFrame) -> pl.DataFrame:
    """Wrappers removed; done once per distinct path and class, of which there are few."""
    paths = frame.get_column("path").drop_nulls().unique()
    clean = [normalise_path(path) for path in paths]
    chunks = {p.split(".", 1)[0] for p in clean if p.split(".", 1)[0].isdecimal()}
    if chunks == {"0"} and all(p == "0" or p.startswith("0.") for p in clean):
        # A list of one model: its number says nothing. With several it tells chunks apart.
        clean = [normalise_path(p[2:]) for p in clean]
    table = pl.DataFrame(
        {"path": paths, "clean": clean}, schema={"path": pl.String, "clean": pl.String}
    )
    classes = frame.get_column("op").unique()
    class_table = pl.DataFrame(
        {"op": classes, "class": [normalise_class(c or "") for c in classes]},
        schema={"op": pl.String, "class": pl.String},
    )
    frame = frame.join(table, on="path", how="left", maintain_order="left").join(
        class_table, on="op", how="left", maintain_order="left"
    )
    leaf = pl.col("clean").str.extract(r"([^.]*)$")
    parent = pl.col("clean").str.replace(r"\.?[^.]*$", "")
    parameter = pl.col("parameter")
    return frame.with_columns(
        module=pl.when(parameter).then(parent).otherwise(pl.col("clean")),
        op=pl.col("class"),
        debug_index=pl.when(parameter).then(leaf).otherwise(pl.col("debug_index")),
    )
