"""One sample, as its debug files hold it."""

import dataclasses
import enum
from typing import Any

from slime.utils.version import is_old


class Status(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclasses.dataclass
class _Base:
    group_index: int | None = None
    index: int | None = None
    prompt: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "status": self.status.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "_Base":
        data = {**data, "status": Status(data["status"])}
        known = {field.name for field in dataclasses.fields(cls)}
        sample = cls(**{name: value for name, value in data.items() if name in known})
        # what a version does not know becomes an attribute: None included
        for name in data.keys() - known:
            setattr(sample, name, data[name])
        return sample


@dataclasses.dataclass
class _New(_Base):
    rollout_id: int | None = None
    teacher_log_probs: list[float] | None = None


Sample = _Base if is_old() else _New
