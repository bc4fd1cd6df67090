"""Hold results of the faults written blind against their answers.

    rlprobe selftest --no-ray --faults tests/blind_faults/on_verl --pass refined --json found.json
    python tests/blind_faults/score.py found.json -o scores.json

``--answers`` takes those of another set (``tests/blind_faults/second/answers.yaml``), ``--family``
another part of them (``lawless``, of the third set's disturbances on verl).

Each of stage, module and class is ``right`` or ``wrong``; a class may also be ``also true`` (no
false statement, and no success) or ``unknown``. ``before`` is the class of the first pass, which
statistics alone named.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ANSWERS = Path(__file__).with_name("answers.yaml")
RIGHT, ALSO, UNKNOWN, WRONG = "right", "also true", "unknown", "wrong"


def of_class(cause: str | None, answer: dict[str, Any]) -> str:
    """What a class is worth."""
    if cause == answer["cause"]:
        return RIGHT
    if cause in answer.get("also_true", answer.get("may_say", ())):
        return ALSO
    return UNKNOWN if cause in (None, "unknown") else WRONG


def modules(answer: dict[str, Any]) -> list[str | None]:
    """Modules that are right; None where none is at fault, which some answers write as null."""
    named: list[str | None] = answer["modules"] or [None]
    return named


def scored(
    rows: list[dict[str, Any]], file: Path = ANSWERS, family: str = "verl"
) -> dict[str, dict[str, Any]]:
    """By fault: what was found and what it is worth.

    Args:
        rows: of ``rlprobe selftest --json``.
        file: the answers.
        family: the part of them that is meant.

    Raises:
        KeyError: a row is of no fault that has an answer.
    """
    every = yaml.safe_load(file.read_text(encoding="utf-8"))
    answers, harmless = every[family], every.get("benign", ())
    found = {}
    for row in sorted(rows, key=lambda row: row["name"]):
        if row["name"] in harmless:
            continue  # its verdict is all there is to hold against
        answer = answers[row["name"]]
        refined = row.get("refined", {}).get("found") or row["found"]
        located = refined["verdict"] == answer.get("verdict", "diverged")
        stage = located and refined["stage"] == answer["stage"]
        found[row["name"]] = {
            "verdict": RIGHT if located else WRONG,
            "stage": RIGHT if stage else WRONG,
            "module": RIGHT if stage and refined["module"] in modules(answer) else WRONG,
            "class": of_class(refined["cause"], answer),
            "named": refined["cause"],
            "known": refined["known"],
            "before": of_class(row["found"]["cause"], answer),
            "named_before": row["found"]["cause"],
            "should": answer["cause"],
            "seconds": row["seconds"],
        }
    return found


def summed(scores: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts over all faults."""
    every = list(scores.values())
    shown = ("observed", "reproduced")
    return {
        "faults": len(every),
        "stage right": sum(s["stage"] == RIGHT for s in every),
        "module right": sum(s["module"] == RIGHT for s in every),
        "class": dict(Counter(s["class"] for s in every)),
        "right, observed or reproduced": sum(
            s["class"] == RIGHT and s["known"] in shown for s in every
        ),
        "class before refining": dict(Counter(s["before"] for s in every)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("found", nargs="+", type=Path, help="files of rlprobe selftest --json")
    parser.add_argument("--answers", type=Path, default=ANSWERS, help="of the set that was run")
    parser.add_argument("--family", choices=("verl", "lawless"), default="verl")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    rows = [row for path in given.found for row in json.loads(path.read_text(encoding="utf-8"))]
    scores = scored(rows, given.answers, given.family)
    document = {"summary": summed(scores), "faults": scores}
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document["summary"], indent=1))


if __name__ == "__main__":
    main()
