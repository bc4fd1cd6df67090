"""Why a record is not held against its floor: two closed lists, the words of docs/diagnosis.md.

**Excused**: it was measured, and differs (or may) on grounds that are known and no fault.
**Unjudged**: nothing can be said of it. Neither is ever counted as agreement.
"""

from __future__ import annotations

NEAR_TIES, RECOMPOSED, MASKED_VALUE, PADDING_ONLY, INHERITED = (
    "near_ties",
    "recomposed",
    "masked_value",
    "padding_only",
    "inherited",
)
DEVICE, UNWRITTEN, DECISION = "device", "unwritten", "decision"
FEW_NUMBERS, NO_WORSE = "few_numbers", "no_worse"
#: Reason -> what it means, in words for messages and the page.
EXCUSES: dict[str, str] = {
    NEAR_TIES: "behind a choice of experts that fell the other way within round-off",
    RECOMPOSED: "inside a block that agrees and holds its rows otherwise",
    MASKED_VALUE: "an additive mask that says never with another number, and masks the same",
    PADDING_ONLY: "differs only at positions that no result depends on (padding)",
    INHERITED: "differs as much as what the stage was given accounts for",
    UNWRITTEN: "memory that nothing has written yet: empty, or about to be filled by a collective",
    DECISION: "decides or divides between numbers that differ, which round-off may tip: by how "
    "much a decision differs is not judged",
    FEW_NUMBERS: "a few numbers that came out smaller than in its other calls: the same round-off",
    NO_WORSE: "differs, and is no further from the high-precision control than the benchmark is",
    DEVICE: "names the device or its communication library, which differ by intent",
}

LATER_STEP, AFTER_UPDATE, OTHER_PLACES = "later_step", "after_update", "other_places"
NO_PARTNER, OTHER_SHAPE, OTHER_KIND, UNREADABLE, NO_NUMBERS, BOTH_NONFINITE = (
    "no_partner",
    "other_shape",
    "other_kind",
    "unreadable",
    "no_numbers",
    "both_nonfinite",
)
GIVEN, NOT_JOINED, AS_CHANGES, METRIC = "given", "not_joined", "as_changes", "metric"
NO_TRAJECTORY = "no_trajectory"
ALL_ZERO, ROUNDED_AWAY = "all_zero", "rounded_away"
OTHER_MODULES = "other_modules"
NO_FLOOR, GENERATED, CHOICE = "no_floor", "generated", "choice"
UNJUDGED: dict[str, str] = {
    LATER_STEP: "of a captured step after the first, which inherits what updates differ by",
    AFTER_UPDATE: "after the stage's first update of weights, which it inherits",
    AS_CHANGES: "weights after an update, whose difference is judged as changes",
    OTHER_PLACES: "of a micro-batch that holds other samples, or in another order",
    NO_PARTNER: "recorded on one side only",
    OTHER_MODULES: "of a module that the other side's model has not, or has as part of another",
    OTHER_SHAPE: "of another shape on the other side",
    OTHER_KIND: "numbers on one side, booleans or whole numbers on the other",
    UNREADABLE: "its file cannot be read",
    NO_NUMBERS: "nothing of it was measured",
    ALL_ZERO: "zero on both sides, as all records of its kind in the update: 0 = 0 says nothing",
    ROUNDED_AWAY: "a change smaller than half a unit in the last place of the 16-bit weights that "
    "it was read off",
    BOTH_NONFINITE: "not finite on both sides",
    GIVEN: "what a stage was given; looked at where validity and the cause are",
    METRIC: "a number that the trainer reports, whose curve has no verdict",
    NO_TRAJECTORY: "a number that the trainer reports of a run that was joined at each step",
    NOT_JOINED: "key data of which no row could be joined by sample",
    NO_FLOOR: "a result of a stage without floating-point forward records: nothing says how deep "
    "the model is, so that nothing bounds its round-off",
    CHOICE: "what an engine would have chosen and by how much, which follows from its log-probs",
    GENERATED: "what was generated, and what was made of it: round-off may choose another token",
}

INTENDED, HARMLESS, UNIMPORTED = "intended", "harmless", "unimported"
SHOWN, COPIED, TIMED = "shown", "copied", "timed"
#: What a run recorded besides, and that is held against nothing: information alone.
UNHELD: dict[str, str] = {
    INTENDED: "of a process's device, host and determinism, which may differ by intent",
    HARMLESS: "a setting of the framework that cannot change what is computed",
    UNIMPORTED: "code of a package that a process need not have imported",
    SHOWN: "who called, and after what: shown beside a record, which is judged by its numbers",
    COPIED: "a dump's own file or a digest in the manifest, of what the tables that are judged say",
    TIMED: "how long something took, or how much of it there was",
}
