"""docs/configuration.md, generated from the models, so that it cannot fall behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlprobe.config.alignment import Alignment

_INTRO = """\
# Configuration reference

One YAML file describes one alignment. This page is generated from the models that check it
(`rlprobe config reference`); `rlprobe config check FILE` names every problem of a file at once.

- Unknown keys, wrong types and contradictions are refused before anything runs.
- Relative paths resolve against the directory the workflow or command runs in.
- Numbers are read as they look: `010` is ten, `12:30:00` is text. A key may be given once.
- *Identity* says whether a key is part of what makes a run the same run: changing one starts the
  runs it concerns anew, changing any other key does not.

`benchmark` and `target` have the same keys, and one more each. Environment variables:
`RLPROBE_FAULT=FILE.py:NAME` plants a fault in the target, before `target.fault`.
"""

#: Keys, by section, that are not part of a run's identity; None: the section's every key.
_NOT_IDENTITY: dict[str, set[str] | None] = {
    "": {
        "name",
        "ray",
        "controls",
        "analysis",
        "store",
        "results",
        "coverage",
        "refine",
        "fail_on_divergence",
    },
    "benchmark": {"resources", "run"},
    "target": {"resources"},
    "controls": {"repeat", "repeat_target", "high_precision", "perturbed"},
    "capture": {"budget_mib"},
    "analysis": None,
    "resources": None,
    "container": {"runtime", "args"},
}

#: Sections in the order of a file, with the place of those that stand in several.
_SECTIONS = {
    "model": "",
    "data": "",
    "steps": "",
    "entrypoint": "In `entry_point`.",
    "capture": "",
    "benchmark": "",
    "target": "",
    "container": "In `benchmark` and `target`.",
    "controls": "",
    "analysis": "",
    "resources": "In `benchmark`, `target` and `analysis`.",
}


def reference_text() -> str:
    """The page as docs/configuration.md holds it."""
    schema = Alignment.model_json_schema(mode="validation")
    definitions = {
        name.removesuffix("Section").lower(): section for name, section in schema["$defs"].items()
    }
    lines = [_INTRO, "## The alignment", "", *_table(schema, "")]
    for name, place in _SECTIONS.items():
        section = definitions.pop(name)
        summary = section["description"].split("\n\n")[0].replace("\n", " ")
        lines += ["", f"## {name}", "", f"{summary} {place}".strip(), ""]
        lines += _table(section, name)
    if definitions:
        raise KeyError(f"sections without a place in the page: {sorted(definitions)}")
    return "\n".join(lines) + "\n"


def _table(section: dict[str, Any], name: str) -> Iterator[str]:
    yield "| key | type | default | identity | meaning |"
    yield "|---|---|---|---|---|"
    outside = _NOT_IDENTITY.get(name, set())
    for key, value in section["properties"].items():
        default = "required" if key in section.get("required", ()) else _default(value)
        identity = "no" if outside is None or key in outside else "yes"
        meaning = " ".join(value["description"].split())
        if value.get("examples"):
            meaning += f" Example: `{json.dumps(value['examples'][0])}`"
        yield f"| `{key}` | {_type(value)} | {default} | {identity} | {meaning} |"


def _default(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return "see below"
    if "default" not in value:
        return "`{}`"
    return f"`{json.dumps(value['default'])}`"


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        section = value["$ref"].rpartition("/")[2].removesuffix("Section").lower()
        return f"[section](#{section})"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(kind) for kind in value["anyOf"]))
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    kind = value.get("type")
    if kind == "array":
        items = value.get("items") or (value.get("prefixItems") or [{}])[0]
        return f"list of {_type(items)}"
    names = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "null": "null",
        "object": "mapping of text",
    }
    return names[str(kind)]
