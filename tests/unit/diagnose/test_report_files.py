"""What the page is written from, can leave out, and has beside it: no browser is asked."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.judge import tables
from rlprobe.report import gradient_norms, payload, spreadsheet, words
from tests import resealed

pytestmark = pytest.mark.slow


def test_every_text_is_there_in_both_languages() -> None:
    for key, (english, chinese) in words.every().items():
        assert english.strip() and chinese.strip(), key
        # what is filled in may be of one language, and is called so
        fields = [
            {part.split("}")[0].removesuffix(f"_{language}") for part in text.split("{")[1:]}
            for language, text in zip(words.LANGUAGES, (english, chinese), strict=True)
        ]
        assert fields[0] == fields[1], key


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("model.layers.3.post_attention_layernorm", "norm"),
        ("model.layers.3.self_attn.q_norm", "norm"),
        ("model.layers.3.self_attn.o_proj", "attention"),
        ("model.layers.3.mlp.experts.7.up_proj", "experts"),
        ("model.layers.3.mlp.gate", "experts"),
        ("model.layers.3.mlp.gate_proj", "mlp"),
        ("decoder.layers.0.mlp.linear_fc1", "mlp"),
        ("embedding.word_embeddings", "embedding"),
        ("output_layer", "head"),
        ("visual.merger", "other"),
    ],
)
def test_a_parameter_is_of_one_group(module: str, group: str) -> None:
    assert gradient_norms.group(module) == group


def test_prompts_and_responses_can_be_left_out(results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "results"
    shutil.copytree(results, copy)
    said = "What is"
    assert said in (copy / "report.html").read_text(encoding="utf-8")
    assert main(["report", str(copy), "--no-text"]) == 0
    assert said not in (copy / "report.html").read_text(encoding="utf-8")


def test_a_page_of_other_runs_is_kept_and_listed(results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "results"
    shutil.copytree(results, copy)
    page = copy / "report.html"
    text = page.read_text(encoding="utf-8")
    other = text.replace('name="rlprobe-runs" content="', 'name="rlprobe-runs" content="0')
    page.write_text(resealed.page(other), encoding="utf-8")
    assert main(["report", str(copy)]) == 0
    assert len(list((copy / "history").glob("*.html"))) == 1
    assert main(["report", str(copy)]) == 0
    assert len(list((copy / "history").glob("*.html"))) == 1, "the same runs: the same page"
    out = tmp_path / "overview.html"
    assert main(["report", "--index", str(copy), "-o", str(out)]) == 0
    with_pages = out.read_text(encoding="utf-8")
    assert with_pages.count('href="results/') == 2
    assert main(["report", "--index", str(tmp_path / "nowhere"), "-o", str(out)]) == 2


@pytest.mark.parametrize("given", [["results"], ["results", "more/other"], ["results", "."]])
def test_an_overview_lies_beside_what_it_is_about(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    """Not where the command happened to be called."""
    place, here = tmp_path / "place", tmp_path / "here"
    for name in given:
        (place / name).mkdir(parents=True, exist_ok=True)
    shutil.copytree(results, place / "results", dirs_exist_ok=True)
    here.mkdir()
    monkeypatch.chdir(here)
    assert main(["report", "--index", *(str(place / name) for name in given)]) == 0
    assert not list(here.iterdir())
    found = list(tmp_path.rglob("overview.html"))
    assert found == [(tmp_path if "." in given else place) / "overview.html"]


def test_an_overview_of_what_has_only_the_root_in_common_asks_where(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--index", str(results), "/usr"]) == 2
    assert "-o FILE" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_no_name_of_a_dump_is_a_formula(name: str, tmp_path: Path) -> None:
    row = dict.fromkeys(tables.SCHEMA) | {"name": name, "error": -1.5e-7}
    rows = pl.DataFrame([row], schema=tables.SCHEMA).with_columns(
        stage=pl.lit("actor_update"), shape_benchmark=pl.lit("[2]"), shape_target=pl.lit("[2]")
    )
    spreadsheet.write(tmp_path / "r.csv", payload.Records(rows, 1))
    (found,) = csv.DictReader((tmp_path / "r.csv").read_text().splitlines())
    assert found["name"] == f"'{name}" and float(found["error"]) == -1.5e-7


def test_the_judged_tables_lie_where_the_page_says(results: Path) -> None:
    page = (results / "report.html").read_text(encoding="utf-8")
    linked = [part.split('"')[0] for part in page.split('href="judged/')[1:]]
    assert linked and all((results / tables.DIRECTORY / name).is_file() for name in linked)
