"""The page in a real browser: on a phone, on paper, without colours, eyes or scripts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from rlprobe.diagnose import diagnosis
from rlprobe.judge import tables
from rlprobe.judge.inputs import Results, require
from rlprobe.report import scope
from rlprobe.report.content import gather
from rlprobe.report.page import render
from rlprobe.report.side_by_side import MetricRow
from tests.unit.diagnose.shown import IN_A_BROWSER, PHONE, WIDE, Open

pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
pytestmark = IN_A_BROWSER


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_left_out(show: Open, results: Path, viewport: Any, scheme: str) -> None:
    """axe finds no violation, and nothing is wider than the screen."""
    view = show(results / "report.html", viewport=viewport, color_scheme=scheme).view
    view.click("#to-record")
    view.click("#tree-beyond")
    for details in view.locator("details").all():
        details.evaluate("one => { one.open = true; }")
    found = axe.Axe().run(view).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:120]) for v in found] == []
    assert view.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_no_column_is_cut(show: Open, results: Path) -> None:
    """On a phone nothing has to be moved sideways; on a wide screen no heading is cut."""
    view = show(results / "report.html", viewport=PHONE).view
    view.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    wide = view.eval_on_selector_all(
        ".scroll, .tabulator-tableholder",
        "all => all.filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1)"
        ".map(one => one.getAttribute('aria-label') + ' ' + one.scrollWidth)",
    )
    assert wide == []
    labels = view.eval_on_selector_all(
        "#data tbody tr:first-child > *",
        "all => all.map(one => getComputedStyle(one, '::before').content)",
    )
    assert any("Error" in label for label in labels)
    view.click("#language")
    labels = view.eval_on_selector_all(
        "#data tbody tr:first-child > *",
        "all => all.map(one => getComputedStyle(one, '::before').content)",
    )
    assert any("误差" in label for label in labels)
    view = show(results / "report.html").view
    cut = view.eval_on_selector_all(
        ".tabulator-col-title",
        "all => all.slice(0, 9).filter(one => one.scrollWidth > one.clientWidth)"
        ".map(one => one.textContent)",
    )
    assert cut == []
    table = view.locator("#mismatch .scroll, #data .scroll").first
    assert table.evaluate("one => one.scrollWidth <= one.clientWidth")


def test_names_that_do_not_fit_keep_their_ends(show: Open, results: Path) -> None:
    """Records of one module differ in the last part alone."""
    view = show(results / "report.html").view
    view.fill("#f-text", "layers.1.self_attn")
    cell = view.locator(".tabulator-row [tabulator-field=name]").first
    seen = cell.evaluate(
        """one => {
            const text = one.firstElementChild.firstChild;
            const range = document.createRange();
            range.setStart(text, text.length - 8);
            range.setEnd(text, text.length);
            const end = range.getBoundingClientRect(), box = one.getBoundingClientRect();
            return [end.right <= box.right + 1, end.left >= box.left];
        }"""
    )
    assert seen == [True, True]
    assert cell.locator("span").get_attribute("title") == cell.inner_text()


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_curves_stand_side_by_side(
    show: Open, results: Path, tmp_path: Path, size: dict[str, int], count: int
) -> None:
    """However many there are, each has its own place, and its values are named."""
    opened, found = Results.open(results), diagnosis.answer(results)
    sides: list[Any] = [require(opened, role) for role in ("benchmark", "target")]
    page = gather(opened, found, tables.read(opened), *sides)
    band = {"verdict": "within", "low": [0.9, None, 2.9, 3.9], "high": [1.1, None, 3.1, 4.1]}
    curves = [
        {"name": f"actor/m{n}", "steps": [1, 2, 3, 4], "benchmark": [1.0, 2.0, 3.0, 4.0],
         "target": [1.0, 2.0, None, 4.0], **(band if n % 2 else {})}
        for n in range(count)
    ]  # fmt: skip
    row = MetricRow("actor/m0", 1, 1.0, 1.0, Markup("0"))
    live = {**page.live, "curves": curves}
    page = dataclasses.replace(page, metrics=[row], many_steps=True, live=live)
    path = tmp_path / "report.html"
    path.write_text(render(page), encoding="utf-8")
    shown = show(path, viewport=size)
    view = shown.view
    places = [one.bounding_box() for one in view.locator("#curve-plots .uplot").all()]
    assert len(places) == count
    for at, one in enumerate(places):
        assert one["x"] + one["width"] <= size["width"] + 1
        for other in places[at + 1 :]:
            apart = one["x"] + one["width"] <= other["x"] + 1 or other["x"] > one["x"] + 1
            assert apart or other["y"] >= one["y"] + one["height"]
    view.locator("#curve-plots .u-over").last.hover()
    assert "benchmark" in view.locator("#curve-plots .values").last.inner_text()
    assert view.locator("#curve-plots .u-legend").count() == 0
    assert shown.errors == []


def test_steps_of_a_grid_are_all_seen_on_a_phone(show: Open, results: Path, tmp_path: Path) -> None:
    opened, found = Results.open(results), diagnosis.answer(results)
    sides: list[Any] = [require(opened, role) for role in ("benchmark", "target")]
    page = gather(opened, found, tables.read(opened), *sides)
    cells = [scope.Cell(step, 10.0**step, step % 5) for step in range(12)]
    grid = scope.Grid(
        list(range(12)), [scope.Row("actor_update", 0, 1, cells)], True, "key_data_row"
    )
    path = tmp_path / "report.html"
    path.write_text(render(dataclasses.replace(page, grid=grid)), encoding="utf-8")
    view = show(path, viewport=PHONE).view
    for cell in view.locator("table.cells button").all():
        place = cell.bounding_box()
        assert place is not None and place["x"] + place["width"] <= PHONE["width"]
    assert view.locator("table.cells td").last.get_attribute("data-label") == "step 11"


def test_long_names_break_on_a_phone(show: Open, results: Path) -> None:
    """Names of records are as long as a model is deep, and a cause is said with them."""
    view = show(results / "report.html", viewport=PHONE).view
    long = "Module.model.layers.1.input_layernorm." * 4 + "output.0"
    for place in ("#first li", "#first h3", "#verdict p", "#extent p", "#stages p", "#records p"):
        view.locator(place).first.evaluate("(one, text) => { one.textContent = text; }", long)
        assert view.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], place


def test_a_phone_without_scripts_still_reads_the_verdict(show: Open, results: Path) -> None:
    view = show(results / "report.html", viewport=PHONE, java_script_enabled=False).view
    assert view.inner_text("#h-verdict").startswith("Diverged")
    assert "input_layernorm" in view.inner_text("#first").replace("\u200b", "")
    assert view.locator(".still table").count() > 0
    assert not view.is_visible("#grid") and not view.is_visible("[lang=zh]")


def test_on_paper_everything_is_open_and_nothing_is_a_button(show: Open, results: Path) -> None:
    view = show(results / "report.html").view
    view.emulate_media(media="print")
    view.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert view.eval_on_selector_all("details", "all => all.every(one => one.open)")
    assert not view.is_visible("#grid") and view.locator(".still table").first.is_visible()
    seen = view.locator("button:visible").all()
    assert seen and all(one.get_attribute("data-stage") for one in seen), (
        "stages are no buttons there"
    )
    # what is taller than the rest of a page and may not be broken leaves that rest empty
    unbroken = view.eval_on_selector_all(
        "main *",
        "all => all.filter(one => one.checkVisibility() && one.offsetHeight > 400 &&"
        " getComputedStyle(one).breakInside === 'avoid').map(one => one.className || one.tagName)",
    )
    assert unbroken == []
    pdf = view.pdf(format="A4")
    assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page\n") < 60
