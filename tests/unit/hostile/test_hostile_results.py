"""Is an answer that was changed, damaged, or left from something else ever taken for this one's?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlprobe.cli import main
from rlprobe.compare import outdir
from rlprobe.diagnose import diagnosis
from rlprobe.documents import seal
from rlprobe.dumps import results as tables
from rlprobe.errors import DumpError
from rlprobe.judge.inputs import Results
from rlprobe.refine import refined, suspects
from tests.resealed import edited, page
from tests.unit.hostile import good
from tests.unit.hostile.conftest import Aligned, Told

pytestmark = pytest.mark.slow

_TARGET = "compare/target"


def results_of(aligned: Aligned) -> str:
    return str(aligned.results)


def readers(aligned: Aligned) -> dict[str, list[str]]:
    """Commands that read the diagnosis, by one word each."""
    results = results_of(aligned)
    return {
        "verdict": ["verdict", results],
        "verdict of the file": ["verdict", f"{results}/diagnosis.json"],
        "report": ["report", results],
        "report in Markdown": ["report", results, "--format", "md"],
        "report in JSON": ["report", results, "--format", "json"],
        "refine": ["refine", "--config", "a.yaml", "--part", "suspects"],
        "index": ["report", "--index", results, "-o", "overview.html"],
    }


WORDS = ("verdict", "verdict of the file", "report", "report in Markdown", "report in JSON",
         "refine", "index")  # fmt: skip


def refused(aligned: Aligned, word: str, told: Told, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that must not go by the diagnosis."""
    command = readers(aligned)[word]
    if word != "index":
        return told(*command, code=(1,))
    capsys.readouterr()  # an index names those that are wrong, and is written all the same
    assert main(command) == 1
    said = capsys.readouterr().err
    assert Path("overview.html").read_text(encoding="utf-8").count("not_comparable") > 0
    return said


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"aligned"', '"diverged"'),
        ("lie within", "lie withim"),
        ('"digest"', '"dig\\u0065st"'),  # the same text in JSON: nothing was changed
        ('"digest"', '"dikest"'),
        ('"sentence"', '"sentense"'),
        ('"format": 2', '"format": 1'),
    ],
)
def test_a_diagnosis_that_was_changed_is_refused(
    word: str, old: str, new: str, aligned: Aligned, told: Told, capsys
) -> None:
    path = aligned.results / "diagnosis.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    if "u0065" in new:
        assert main(["verdict", results_of(aligned)]) == 0
        return
    said = refused(aligned, word, told, capsys)
    assert "diagnosis.json" in said and "again" in said


@pytest.mark.parametrize("word", WORDS)
def test_a_diagnosis_of_another_comparison_is_refused(
    word: str, aligned: Aligned, told: Told, capsys
) -> None:
    """The sides are compared anew after it, with other numbers."""
    runs = [str(aligned.run(role)) for role in ("benchmark", "target")]
    command = ["compare", *runs, "-o", f"{results_of(aligned)}/{_TARGET}", "--pair", "target"]
    assert main([*command, "--coverage", "0.5", "--rules", "more.yaml", "-q"]) == 2
    Path("more.yaml").write_text("rules: []\n")
    assert main([*command, "--noise", "-q"]) == 0
    said = refused(aligned, word, told, capsys)
    assert "made from another" in said and "summary.json" in said and "diagnose" in said
    assert main(["diagnose", results_of(aligned), "-q"]) == 0
    assert main(["report", results_of(aligned), "-q"]) == 0
    assert main(readers(aligned)[word]) == 0


@pytest.mark.parametrize("what", ["copied", "plan", "summary gone", "judged"])
def test_relatives_of_a_diagnosis_of_something_else(
    what: str, aligned: Aligned, told: Told
) -> None:
    results = aligned.results
    if what == "copied":  # from results of other runs
        shutil.copytree(results, "other")
        runs = [str(aligned.run(role)) for role in ("benchmark", "repeat")]
        assert main(["compare", *runs, "-o", f"other/{_TARGET}", "--pair", "target", "-q"]) == 0
        with edited(Path("other/alignment.json")) as said:
            said["runs"]["target"]["key"] = aligned.jobs.runs["repeat"].key
        assert main(["diagnose", "other", "--no-fail", "-q"]) == 0
        shutil.copyfile("other/diagnosis.json", results / "diagnosis.json")
    elif what == "plan":
        with edited(results / "alignment.json") as said:
            said["coverage"] = 0.1
    elif what == "summary gone":
        next((results / _TARGET).glob("*/summary.json")).unlink()
    else:
        with edited(results / "judged/summary.json") as said:
            said["step"] = 5
    for command in (["verdict", str(results)], ["report", str(results), "--format", "md"]):
        answer = told(*command, code=(1,))
        assert "made from" in answer and "rlprobe diagnose RESULTS_DIR" in answer


def test_a_diagnosis_alone_stands_by_itself(aligned: Aligned) -> None:
    Path("kept").mkdir()
    shutil.copyfile(aligned.results / "diagnosis.json", "kept/diagnosis.json")
    assert main(["verdict", "kept/diagnosis.json"]) == 0
    assert main(["verdict", "kept"]) == 0


def test_a_diagnosis_without_a_digest_is_read_and_said_to_be_unchecked(
    aligned: Aligned, capsys
) -> None:
    path = aligned.results / "diagnosis.json"
    said = json.loads(path.read_text())
    del said["digest"]
    path.write_text(json.dumps(said))
    capsys.readouterr()
    assert main(["verdict", str(path)]) == 0
    assert "carries no digest: nothing shows whether it was changed" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["benchmark", "target"])
def test_a_comparison_of_other_runs_is_not_judged(role: str, aligned: Aligned, told: Told) -> None:
    """Whoever compares by hand into the wrong directory is told so."""
    sides = {"benchmark": aligned.run("benchmark"), "target": aligned.run("target")}
    sides[role] = aligned.run("repeat")
    out = aligned.results / _TARGET
    assert main(["compare", *map(str, sides.values()), "-o", str(out), "--pair", "target"]) == 0
    said = told("diagnose", aligned.results, code=(1,))
    assert aligned.run("repeat").name[:12] in said and aligned.run(role).name[:12] in said
    assert "compare the runs of this alignment" in said


def test_a_run_that_was_made_again_is_compared_again(aligned: Aligned, told: Told) -> None:
    path = aligned.run("target") / "manifest.json"
    said = json.loads(path.read_text())
    said["volatile"] = {**said["volatile"], "made": "again"}
    path.write_text(json.dumps(said))
    shutil.rmtree("store/manifests", ignore_errors=True)
    assert "was made again or changed since; compare again" in told(
        "diagnose", aligned.results, code=(1,)
    )


def flips(data: bytes) -> list[bytes]:
    """A file with one bit of each of some of its bytes flipped."""
    found = []
    for at in range(0, len(data), max(1, len(data) // 60)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        found.append(bytes(changed))
    return found


def says_the_same(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_no_flip_of_a_sealed_document_is_read(tmp_path: Path) -> None:
    """Of every kind that there is."""
    for name, reader in SEALED.items():
        path = tmp_path / name / PLACES[name]
        path.parent.mkdir(parents=True)
        data = good.text_of(name, good.DOCUMENTS[name]).encode()
        path.write_bytes(data)
        reader(path)
        for changed in flips(data):
            path.write_bytes(changed)
            if not says_the_same(data, changed):
                with pytest.raises(DumpError, match=path.name):
                    reader(path)


PLACES = {
    "diagnosis": "diagnosis.json", "plan": "alignment.json", "sides": "sides.json",
    "suspects": "refine/suspects.json", "refined": "refine/refined.json",
    "summary": "summary.json",
}  # fmt: skip
SEALED = {
    "diagnosis": diagnosis.read,
    "plan": lambda path: Results.open(path.parent),
    "sides": lambda path: tables.sides(path.parent),
    "suspects": lambda path: suspects.read(path.parents[1]),
    "refined": lambda path: refined.read(path.parents[1]),
    "summary": lambda path: tables.summary(path.parent),
}


def test_what_is_written_is_sealed(aligned: Aligned, tmp_path: Path) -> None:
    outdir.say(tmp_path, tmp_path, tmp_path, 0.9, {0: 10})
    for path in (
        aligned.results / "alignment.json", aligned.results / "diagnosis.json",
        next((aligned.results / _TARGET).glob("*/summary.json")), tmp_path / "sides.json",
    ):  # fmt: skip
        assert seal.holds(json.loads(path.read_text())), path
    assert tables.sides(tmp_path) == tables.Sides(
        str(tmp_path.resolve()), str(tmp_path.resolve()), 0.9, {0: 10}
    )


# ------------------------------------------------------------------------------------ the index


@pytest.mark.parametrize("damage", ["verdict", "body", "digest", "diagnosis", "another"])
def test_an_index_names_pages_that_are_not_to_be_believed(
    damage: str, aligned: Aligned, capsys
) -> None:
    good_one = aligned.results.with_name("good")
    shutil.copytree(aligned.results, good_one)
    path = aligned.results / "report.html"
    text = path.read_text(encoding="utf-8")
    if damage == "diagnosis":  # made anew, and no page of it
        with edited(aligned.results / "diagnosis.json") as said:
            said["sentence"] += " And more."
    else:
        old, new = {
            "verdict": ('name="rlprobe-verdict" content="aligned"',
                        'name="rlprobe-verdict" content="aligned "'),
            "body": ("<main>", "<mbin>"),
            "digest": ('name="rlprobe-digest"', 'name="rlprobe-digfst"'),
            "another": ('rlprobe-diagnosis" content="', 'rlprobe-diagnosis" content="0'),
        }[damage]  # fmt: skip
        assert old in text
        changed = text.replace(old, new, 1)
        path.write_text(page(changed) if damage == "another" else changed, encoding="utf-8")
    capsys.readouterr()
    assert main(["report", "--index", str(aligned.results), str(good_one), "-o", "o.html"]) == 1
    said = capsys.readouterr()
    assert said.err.count("report.html") == 1 and str(aligned.results) in said.err
    assert "again" in said.err
    listed = Path("o.html").read_text(encoding="utf-8")
    assert "not_comparable" in listed and "report.html" in listed and "aligned" in listed
    assert main(["report", str(aligned.results), "-q"]) == 0
    assert main(["report", "--index", str(aligned.results), str(good_one), "-o", "o.html"]) == 0


@pytest.mark.parametrize("word", ["verdict", "report", "refine", "index"])
@pytest.mark.parametrize("left", [None, 0, 100], ids=["gone", "emptied", "cut short"])
def test_an_answer_is_not_told_without_the_tables_that_it_was_drawn_from(
    left: int | None, word: str, aligned: Aligned, told: Told, capsys
) -> None:
    path = next((aligned.results / _TARGET).glob(f"*/{tables.RECORDS}"))
    if left is None:
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(left)
    said = refused(aligned, word, told, capsys)
    assert str(path) in said
    assert "compare again" in said
