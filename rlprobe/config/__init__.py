"""The alignment file: one typed model per section, loaded with :func:`load`."""

from __future__ import annotations

from rlprobe.config.alignment import Alignment
from rlprobe.config.capture import CaptureSection
from rlprobe.config.container import ContainerSection
from rlprobe.config.device import (
    AnalysisSection,
    BenchmarkSection,
    ControlsSection,
    DeviceSection,
    TargetSection,
)
from rlprobe.config.entrypoint import EntryPointSection
from rlprobe.config.inputs import BUILTIN, DataSection, ModelSection, StepsSection
from rlprobe.config.loading import load, parse, read_yaml
from rlprobe.config.reference import reference_text
from rlprobe.config.resources import ResourcesSection
from rlprobe.config.schema import schema_text

__all__ = [
    "BUILTIN",
    "Alignment",
    "AnalysisSection",
    "BenchmarkSection",
    "CaptureSection",
    "ContainerSection",
    "ControlsSection",
    "DataSection",
    "DeviceSection",
    "EntryPointSection",
    "ModelSection",
    "ResourcesSection",
    "StepsSection",
    "TargetSection",
    "load",
    "parse",
    "read_yaml",
    "reference_text",
    "schema_text",
]
