"""``diagnosis.json``: what was found, as it is written, read and acted upon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from rlprobe.causes import CAUSES, MEANINGS
from rlprobe.documents import seal, structfile
from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.errors import DumpError
from rlprobe.judge import basis
from rlprobe.judge.curves import Curve
from rlprobe.judge.extent import Extents
from rlprobe.judge.routed import Routed
from rlprobe.said import Message, kept

FORMAT = 2
#: Formats that are read; 1 has no extent, and of a cause neither ``known`` nor ``statement``.
FORMATS = (1, 2)
NAME = "diagnosis.json"
#: Directory, below the results, of what a refinement found.
REFINED = "refine"
#: A diagnosis has some kilobytes; anything larger is no diagnosis.
MAX_BYTES = 64 << 20
_JUDGED = "judged/summary.json"
_AGAIN = "run `rlprobe diagnose RESULTS_DIR` again"

Verdict = Literal["aligned", "diverged", "not_comparable"]
ALIGNED, DIVERGED, NOT_COMPARABLE = "aligned", "diverged", "not_comparable"
#: Verdict -> exit code of ``rlprobe verdict``.
EXIT_CODES: dict[str, int] = {ALIGNED: 0, DIVERGED: 3, NOT_COMPARABLE: 4}

OPEN, CAVEAT, SHUT = "open", "caveat", "shut"

Values = dict[str, Any]


class GateItem(msgspec.Struct, frozen=True):
    """One thing that must be the same on both sides before numbers can be judged."""

    item: str
    state: Literal["open", "caveat", "shut"]
    #: What was looked at and found.
    evidence: str
    #: What to do about it; empty where nothing is to be done.
    action: str = ""


class First(msgspec.Struct, frozen=True):
    """Where the two sides part first, in the order of execution."""

    stage: str
    step: int
    rank: int
    #: Hugging Face path; None where no module is at fault (a loss, an optimizer).
    module: str | None
    call: int | None
    operator: str | None
    #: Id of the sample and index of its response token where the difference begins, if known.
    sample: str | None
    token: int | None
    #: Each side's record: name, dtype, shape, max, min, mean, norm.
    benchmark: Values
    target: Values
    #: Of forced generation, which forward it is of: prefill, prompt (before decoding) or decode.
    phase: Literal["prefill", "prompt", "decode"] | None = None


#: How a cause is known: seen in the operators that ran, made again by an experiment, the numbers
#: obey a law that it stands for, or not at all.
Known = Literal["observed", "reproduced", "consistent", "unknown"]
OBSERVED: Final = "observed"
REPRODUCED: Final = "reproduced"
CONSISTENT: Final = "consistent"
UNKNOWN: Final = "unknown"


class Cause(msgspec.Struct, frozen=True):
    """The class of what is wrong, how it is known, what it is in words, and why it is said."""

    class_: str = msgspec.field(name="class")
    known: Known
    statement: str
    evidence: list[str]

    def __post_init__(self) -> None:
        if self.class_ not in CAUSES:
            raise ValueError(f"cause class {self.class_!r}; accepted: {', '.join(CAUSES)}")
        if (self.class_ == UNKNOWN) != (self.known == UNKNOWN):
            raise ValueError(f"cause class {self.class_!r} that is known as {self.known!r}")


class StageResult(msgspec.Struct, frozen=True):
    """One cell of the stage strip."""

    stage: str
    #: aligned, diverged, inherited (after a divergence), replayed, or not_compared.
    state: Literal["aligned", "diverged", "inherited", "replayed", "not_compared"]
    #: Records judged, and those of them beyond their floor.
    records: int
    beyond: int


class Diagnosis(msgspec.Struct, frozen=True):
    """The whole file."""

    verdict: Verdict
    sentence: str
    gate: list[GateItem]
    first: First | None
    cause: Cause | None
    #: Share of each side's records that were measured.
    coverage: dict[str, float]
    #: How the floor was made and what it aims at; see docs/diagnosis.md.
    noise: Values
    stages: list[StageResult]
    #: Per stage and captured step: how much was recorded, judged, excused and not judged, and why.
    extent: Extents = {}
    #: Every metric of the trainer over its steps.
    curves: list[Curve] = []
    #: Training against rollout, a row a captured step (:mod:`rlprobe.diagnose.rollout`).
    rollout: list[Values] = []
    #: Which tokens were sent to other experts, router by router; empty where no model has routers.
    routing: list[Routed] = []
    #: How much the target recorded besides that is held against nothing, by reason
    #: (:mod:`rlprobe.diagnose.unheld`).
    unheld: dict[str, int] = {}
    #: sha256 of ``judged/summary.json``, the tables that this diagnosis follows from.
    judged: str | None = None
    #: What else it was made from: path below the results, and its sha256.
    of: dict[str, str] = {}
    #: How the sentences above were made (:mod:`rlprobe.said`), by sentence: for other languages.
    messages: dict[str, Message] = {}
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """Plain data in the order of the file, sealed (:mod:`rlprobe.documents.seal`).

        What JSON has no number for (NaN, infinities) is None: the seal is of what is written.
        """
        found, made = kept(msgspec.structs.replace(self, messages={}))
        plain = msgspec.json.decode(msgspec.json.encode(found))
        texts = set(_texts(plain))
        messages = {text: m for text, m in (self.messages | made).items() if text in texts}
        return seal.sealed({"format": plain.pop("format"), **plain, "messages": messages})


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _renew(raw: dict[str, Any]) -> None:
    """Bring a diagnosis of format 1, whose causes had a confidence, to the present one."""
    raw["format"] = FORMAT
    cause = raw.get("cause")
    if isinstance(cause, dict) and cause.pop("confidence", None) is not None:
        class_ = cause.get("class")
        cause["known"] = UNKNOWN if class_ == UNKNOWN else CONSISTENT
        cause["statement"] = MEANINGS.get(str(class_), "")


def read(path: Path) -> Diagnosis:
    """Read a diagnosis.

    Raises:
        DumpError: there is none, it is of another format, or it is not what diagnose wrote.
    """
    try:
        data = read_bytes(path, MAX_BYTES)
    except DocumentError as error:
        raise DumpError(f"{path} {error}; `rlprobe diagnose RESULTS_DIR` writes it") from error
    try:
        return structfile.parse(data, Diagnosis, FORMATS, str(path), renew=_renew, again=_AGAIN)
    except DocumentError as error:
        raise DumpError(f"{path} is not a diagnosis: {error}; {_AGAIN}") from error


def current(directory: Path, name: str = NAME) -> Diagnosis:
    """A diagnosis of what is in its results directory.

    Args:
        directory: RESULTS_DIR.
        name: the diagnosis's place in it.

    Raises:
        DumpError: as :func:`read`; or it was made from other files than are there.
    """
    path = directory / name
    found = read(path)
    named = dict(found.of)
    if found.judged is not None:
        named[_JUDGED] = found.judged
    basis.check(directory, named, path, _AGAIN)
    return found


def answer(directory: Path) -> Diagnosis:
    """The one answer of a results directory: the refined diagnosis where there is one.

    A refined diagnosis differs from the one it refines in its cause alone; one that differs in
    anything else is of earlier results.

    Raises:
        DumpError: as :func:`current`.
    """
    found = current(directory)
    path = directory / REFINED / NAME
    if not path.is_file():
        return found
    sharper = read(path)
    same = msgspec.structs.replace(
        sharper, cause=found.cause, sentence=found.sentence, messages=found.messages
    )
    return sharper if same == found else found
