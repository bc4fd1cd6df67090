"""The JSON schema that Snakemake and editors use says what the models say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlprobe.cli import main
from rlprobe.config import Alignment, load, schema_text

SCHEMA = yaml.safe_load(schema_text())


def test_the_committed_schema_is_current(root: Path) -> None:
    committed = root / "workflow" / "schemas" / "alignment.schema.json"
    assert committed.read_text(encoding="utf-8") == schema_text(), (
        "run: rlprobe config schema > workflow/schemas/alignment.schema.json"
    )


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert capsys.readouterr().out == schema_text()


def shipped(root: Path) -> list[Path]:
    return [root / "config" / "config.yaml", *sorted((root / "config" / "examples").glob("*.yaml"))]


def test_every_shipped_alignment_is_valid_for_the_models_and_the_schema(root: Path) -> None:
    found = shipped(root)
    assert len(found) >= 2
    for path in found:
        load(path)
        jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), SCHEMA)


@pytest.mark.parametrize(
    "change",
    [{"seed": "one"}, {"sede": 1}, {"benchmark": {"device": "gpu"}}, {"name": "a b"}],
)
def test_the_schema_refuses_what_the_models_refuse(root: Path, change: dict[str, Any]) -> None:
    raw = yaml.safe_load((root / "config" / "config.yaml").read_text(encoding="utf-8"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**raw, **change}, SCHEMA)


def test_every_key_is_described() -> None:
    sections = {"": SCHEMA, **SCHEMA["$defs"]}
    undescribed = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, value in section.get("properties", {}).items()
        if not value.get("description")
    ]
    assert undescribed == []


def test_the_committed_page_is_current(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    committed = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == capsys.readouterr().out, (
        "run: rlprobe config reference > docs/configuration.md"
    )


def test_every_key_is_on_the_page(root: Path) -> None:
    text = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = [*Alignment.model_fields]
    for definition in SCHEMA["$defs"].values():
        keys += definition.get("properties", {})
    assert [key for key in keys if f"| `{key}` |" not in text] == []
