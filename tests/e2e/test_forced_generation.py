"""Is a fault of the target's inference engine alone found at its layer, in prefill or decoding?

Real verl in one process (see test_inprocess): every engine is led through the benchmark's
responses, and training goes on with the recorded rollouts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlprobe import stages
from rlprobe.cli import main
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.judge import forced, tables
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, REPEAT, TARGET
from rlprobe.selftest import catalogue
from rlprobe.selftest.pipeline import Judged, Pipeline, Trial
from tests.e2e import forced_faults

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FAULTS = Path(forced_faults.__file__)
SAMPLES, TOKENS = 8, 8


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("forced")
    (directory / "forced.py").write_text(FAULTS.read_text())
    return directory


def judged(pipeline: Pipeline, faults: Path, name: str) -> tuple[Judged, Diagnosis]:
    found = pipeline.judge(Trial(catalogue.cases([faults], [name])[0]))
    return found, found.diagnosis


def apart(found: Judged, phase: str) -> int:
    """Forwards of a phase with a record beyond its floor."""
    results = Results.open(found.directory)
    run = results.run(BENCHMARK)
    assert run is not None
    table = tables.read_table(results, stages.FORCED)
    numbers = set(table.filter(table["beyond"])["micro_batch"].drop_nulls())
    known = forced.forwards(run, 0, 0)
    return sum(known[number].phase == phase for number in numbers)


def test_other_kernels_are_led_through_the_same_responses(pipeline: Pipeline, faults: Path) -> None:
    found, diagnosis = judged(pipeline, faults, "other_kernels")
    assert diagnosis.verdict == "aligned", diagnosis.sentence
    results = Results.open(found.directory)
    for role in (BENCHMARK, TARGET, REPEAT):
        run = results.run(role)
        assert run is not None
        assert run.manifest.stages[stages.FORCED].state == "captured"
        known = forced.forwards(run, 0, 0)
        assert len(known) == SAMPLES * (1 + TOKENS)
        one = known[: 1 + TOKENS]
        assert [f.phase for f in one] == ["prefill", "prompt", *["decode"] * (TOKENS - 1)]
        assert [f.token for f in one] == [0, *range(TOKENS)]
        assert len({f.sample for f in known}) == SAMPLES
    strip = {cell.stage: cell for cell in diagnosis.stages}
    assert strip[stages.FORCED].state == "aligned" and strip[stages.FORCED].records > 1000
    table = tables.read_table(results, stages.FORCED)
    own = {row["name"]: row for row in table.filter(slot="key_data").iter_rows(named=True)}
    for phase, tokens in (("prefill", 16), ("decode", TOKENS)):
        row = own[f"forced_{phase}_log_probs"]
        assert row["judged"] and row["count"] == SAMPLES * tokens and 0 < row["excess"] < 1


def test_the_page_says_what_is_the_methods_and_what_the_devices(
    pipeline: Pipeline, faults: Path
) -> None:
    found, _ = judged(pipeline, faults, "cache_off_by_one")
    assert main(["report", str(found.directory)]) == 0
    page = (found.directory / "report.html").read_text(encoding="utf-8")
    section = page[page.index('<section id="mismatch"') : page.index('<section id="weights"')]
    rows = re.findall(
        r'<span lang="en">(\w+)</span><span lang="zh">\w+</span></th>'
        r'<td[^>]*><span lang="en">([^<]+)<'
        r'.*?<td class="n">(\d+)</td><td class="n">([^<]+)</td>',
        section,
    )
    mean = {(side, against): float(d) for side, against, _, d in rows}
    engine = ("its engine, prefill", "its engine, decoding")
    assert all(mean["benchmark", against] < 1e-5 for against in ("what was generated", *engine))
    assert mean["target", engine[0]] < 1e-5 < 0.1 < mean["target", engine[1]]
    assert "来自设备的部分（双方相同的 token）" in section and "in decoding" in section
    choices = section[section.index('id="generation"') :]
    assert f'<td class="n">{SAMPLES}</td><td class="n">{SAMPLES * 16}</td>' in choices
    # neither engine's answers depend on who else is in the batch: this one takes them one by one
    assert choices.count(f"all at once: {SAMPLES} have the same tokens both times") == 2 * 2
    assert choices.count(f"alone and alone again: {SAMPLES} have the same tokens") == 2
    assert '<td><span lang="en">no</span>' in choices and '"en">yes<' not in choices


def test_a_cache_off_by_one_is_found_in_decoding(pipeline: Pipeline, faults: Path) -> None:
    found, diagnosis = judged(pipeline, faults, "cache_off_by_one")
    first = diagnosis.first
    assert first is not None and diagnosis.cause is not None, diagnosis.sentence
    assert (first.stage, first.module) == (stages.FORCED, forced_faults.ATTENTION)
    assert (first.phase, first.token) == ("decode", 1)
    assert "when token 1 of a response is decoded" in diagnosis.sentence
    assert apart(found, "prefill") == apart(found, "prompt") == 0
    assert apart(found, "decode") == SAMPLES * (TOKENS - 1)
    assert "prefills of prompt and response: 0 of 8 part" in diagnosis.cause.evidence
    assert any(
        "forced_decode_log_probs: token 1 of the response is the first" in e
        for e in diagnosis.cause.evidence
    )
    assert ", 0 of them near ties." in diagnosis.sentence
    # training goes on with what was recorded: the fault is in no other stage
    others = [cell for cell in diagnosis.stages if cell.stage not in stages.ENGINE_STAGES]
    assert others and all(cell.beyond == 0 for cell in others)


@pytest.mark.long
def test_a_temperature_applied_twice_is_named(pipeline: Pipeline, faults: Path) -> None:
    found, diagnosis = judged(pipeline, faults, "temperature_twice")
    first, cause = diagnosis.first, diagnosis.cause
    assert first is not None and cause is not None, diagnosis.sentence
    assert (first.stage, first.module, first.phase) == (stages.FORCED, None, "prefill")
    assert cause.class_ == "sampling_semantics" and "at 0.7 times" in cause.statement, cause

    assert main(["report", str(found.directory)]) == 0
    page = (found.directory / "report.html").read_text(encoding="utf-8")
    for phase in ("prefill", "decoding"):
        said = f"On the target side the engine (its engine, {phase}) has log-probs of 0.701 times"
        assert said in page
    assert "On the benchmark side the engine (" not in page, "its gap is round-off"


@pytest.mark.long
def test_other_angles_are_found_where_they_are_made(pipeline: Pipeline, faults: Path) -> None:
    found, diagnosis = judged(pipeline, faults, "angles")
    first = diagnosis.first
    assert first is not None, diagnosis.sentence
    assert (first.stage, first.module, first.phase) == (
        stages.FORCED, "model.rotary_emb", "prefill",
    )  # fmt: skip
    assert apart(found, "prefill") == SAMPLES and apart(found, "decode") > 0
    assert main(["report", str(found.directory)]) == 0
    page = (found.directory / "report.html").read_text(encoding="utf-8")
    assert "On the target side engine and training part from model.layers.0 on" in page
    assert "On the benchmark side engine and training agree in all 2 blocks" in page


@pytest.mark.long
def test_other_weights_of_the_engine_shut_the_gate(pipeline: Pipeline, faults: Path) -> None:
    _, diagnosis = judged(pipeline, faults, "other_weights")
    assert diagnosis.verdict == "not_comparable"
    assert f"{stages.FORCED}: 1 of 27 parameters differ" in diagnosis.sentence
