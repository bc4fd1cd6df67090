"""What a job asks the cluster's scheduler for."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from rlprobe.config.section import Section

#: What Slurm's executor plugin takes: no hyphens, dots or comma lists.
_GRES = r"^[A-Za-z0-9_]+(:[A-Za-z0-9_]+)?:[1-9][0-9]*$"
#: Options of sbatch that the other keys, or Snakemake's Slurm executor, set.
_OWN_OPTION = re.compile(
    r"(?:^|\s)(?:--(?:partition|account|nodes|ntasks[a-z-]*|time|constraint|qos|gres|gpus[a-z-]*"
    r"|mem[a-z-]*|cpus-per-[a-z]+|exclusive|job-name|output|error|clusters)\b|-[pANntCJoecMG]\b)"
)
_MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}
_MINUTES = {"m": 1, "h": 60, "d": 24 * 60}


def _amount(value: object, units: str, example: str) -> object:
    if isinstance(value, str) and re.fullmatch(rf"[1-9][0-9]*[{units}]", value):
        return value
    raise ValueError(f"found {value!r}; accepted: a number with its unit ({units}), as {example}")


Memory = Annotated[
    str, BeforeValidator(lambda v: _amount(v, "MGT", "64G"), json_schema_input_type=str)
]
Time = Annotated[
    str, BeforeValidator(lambda v: _amount(v, "mhd", "90m"), json_schema_input_type=str)
]


class ResourcesSection(Section):
    """A job's share of the cluster; ignored on a laptop."""

    partition: str | None = Field(
        default=None, min_length=1, description="Slurm partition.", examples=["gpu"]
    )
    gres: str | None = Field(
        default=None,
        pattern=_GRES,
        description="Devices per node as NAME:COUNT or NAME:TYPE:COUNT. null where the site "
        "has no such resource: ask for the whole node with exclusive then.",
        examples=["gpu:8", "npu:ascend910b:8"],
    )
    exclusive: bool = Field(default=False, description="Whole nodes.")
    nodes: int = Field(default=1, ge=1, description="Nodes of one run.")
    interface: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,15}$",
        description="Network interface by which the nodes of one run reach each other (Ray and "
        "collective communication); null: the one that leads to the other nodes.",
        examples=["ib0"],
    )
    cpus: int | None = Field(
        default=None, ge=1, description="CPU cores per node; null: the partition's default."
    )
    memory: Memory | None = Field(
        default=None, description="Main memory per node, in M, G or T.", examples=["512G"]
    )
    time: Time | None = Field(
        default=None, description="Wall-clock limit in m, h or d.", examples=["4h"]
    )
    account: str | None = Field(default=None, min_length=1, description="Slurm account.")
    constraint: str | None = Field(
        default=None, min_length=1, description="Node feature.", examples=["ascend910b"]
    )
    qos: str | None = Field(default=None, min_length=1, description="Slurm quality of service.")
    extra: str | None = Field(
        default=None,
        min_length=1,
        description="Further options of sbatch, as on its command line.",
        examples=["--reservation=alignment"],
    )

    @model_validator(mode="after")
    def _each_option_once(self) -> ResourcesSection:
        taken = _OWN_OPTION.search(self.extra or "")
        if taken is not None:
            raise ValueError(
                f"extra: found {taken.group().strip()}; accepted: options that have no key of "
                f"their own ({', '.join(k for k in type(self).model_fields if k != 'extra')})"
            )
        return self

    @property
    def memory_mib(self) -> int | None:
        """Main memory per node in MiB."""
        return None if self.memory is None else int(self.memory[:-1]) * _MIB[self.memory[-1]]

    @property
    def minutes(self) -> int | None:
        """Wall-clock limit in minutes."""
        return None if self.time is None else int(self.time[:-1]) * _MINUTES[self.time[-1]]
