"""The JSON schema of an alignment file, generated from the models."""

from __future__ import annotations

import json

from rlprobe.config.alignment import Alignment


def schema_text() -> str:
    """The schema as the file workflow/schemas/alignment.schema.json holds it."""
    schema = Alignment.model_json_schema(mode="validation")
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rlprobe alignment",
        **{key: value for key, value in schema.items() if key != "title"},
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
