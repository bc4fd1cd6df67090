"""What every section of an alignment shares."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of the configuration models: strict types, no unknown keys, immutable.

    A misspelt key or a number where text belongs is a mistake to report, not one to guess about:
    a guess would compare two runs that nobody asked for.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=False,
    )
