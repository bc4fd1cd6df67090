"""What a verdict means for who has to mend something: the kind of cause, and where to look."""

from __future__ import annotations

from markupsafe import Markup

from rlprobe.causes import CAUSES, MEANINGS
from rlprobe.diagnose import sentence
from rlprobe.diagnose.diagnosis import DIVERGED, Cause, Diagnosis
from rlprobe.judge.extent import TRAINER
from rlprobe.judge.inputs import Results
from rlprobe.report import words
from rlprobe.said import NOTHING_SAID, Said, replaced, restored


def kind(found: Diagnosis) -> Markup | None:
    """What the class of the cause means, in words; None where none is known."""
    cause = found.cause
    if cause is None or cause.class_ not in CAUSES or cause.class_ == "unknown":
        return None
    return words.cause(cause.class_)


def plain_cause(cause: Cause) -> str:
    """A cause in English: of which kind it is, where that is known, and what was found."""
    if cause.class_ not in MEANINGS or cause.class_ == "unknown":
        return cause.statement
    return f"{MEANINGS[cause.class_]}: {cause.statement}"


def of_trainer(found: Diagnosis) -> bool:
    """Whether what parts first is a number that the trainer reports, and no record."""
    return found.first is not None and found.first.stage == TRAINER


def to_mend(results: Results, found: Diagnosis) -> Markup | None:
    """Where to look first after a divergence, and what then; None after any other verdict."""
    class_ = _class(found)
    if class_ is None:
        return None
    if of_trainer(found):
        key, given = _metric(found)
        return words.both(key, **given)
    then = words.both("run_again_dumps" if results.of_dumps else "run_again")
    return Markup("{} {}").format(words.advice(class_), then)


def without_cause(found: Diagnosis) -> Said:
    """The verdict's sentence without the cause, for where that is said above it."""
    whole = restored(found.sentence, found.messages)
    if found.cause is None:
        return whole
    return replaced(whole, sentence.why(found.cause, found.messages), NOTHING_SAID)


def plain(found: Diagnosis) -> str | None:
    """The same in English alone, for a terminal or a pull request."""
    class_ = _class(found)
    if class_ is None:
        return None
    if of_trainer(found):
        key, given = _metric(found)
        return words.text(key, "en", **given)
    return words.plain_advice(class_)


def _metric(found: Diagnosis) -> tuple[str, dict[str, int]]:
    """What to do about a metric: its step's records say more, unless they agree already."""
    assert found.first is not None
    step = found.first.step
    own = [c for c in found.curves if (c.metric, c.step) == (found.first.operator, step)]
    if any(curve.by == "records" for curve in own):
        return "metric_of_records", {}
    return "metric_of_chaos", {"step": step}


def _class(found: Diagnosis) -> str | None:
    if found.verdict != DIVERGED:
        return None
    named = found.cause.class_ if found.cause is not None else "unknown"
    return named if named in CAUSES else "unknown"
