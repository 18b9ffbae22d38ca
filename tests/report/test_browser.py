"""The report in a real headless Chromium: drawn, sortable, quiet, harmless, legible on a small screen and in the
dark."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from report.synthetic_study import NINE, write_study

import headwise_verdict.reporting

EVIL = '<img src=x onerror="window.harmed=1"></script><script>window.harmed=2</script>'


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    methods = (*NINE[:8], EVIL)
    folder = write_study(
        tmp_path_factory.mktemp("study"), methods=methods, epochs=6, diverged={(NINE[2], 3)}, watched=True
    )
    return headwise_verdict.reporting.write(folder)


class Visit:
    """Open a page and note everything that it says or asks for."""

    def __init__(self, browser, path: Path, width: int = 1280, scheme: str = "light"):
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.messages, self.requests = [], []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-charts=ready]")

    def unfold(self):
        """Open every fold, and wait until the charts in them are drawn."""
        self.page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
        self.page.wait_for_function(
            "() => !document.querySelector('figure[data-chart]:not([data-drawn])')", timeout=300_000
        )

    @property
    def answer(self):
        """Return the table that answers."""
        return self.page.locator("#result table")

    def column(self, number: int) -> list[str]:
        rows = self.answer.locator("tbody tr").all()
        return [row.locator("th, td").nth(number).inner_text().strip() for row in rows]


@pytest.fixture(scope="module")
def visit(browser, report):
    return Visit(browser, report)


def test_the_page_is_quiet_and_asks_for_nothing_but_itself(visit, report):
    assert visit.messages == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [report.as_uri()]


def test_every_open_chart_is_drawn_with_marks(visit):
    figures = visit.page.locator("figure[data-chart]:not(details:not([open]) figure)")
    states = figures.evaluate_all(
        "all => all.map(f => [f.dataset.drawn, f.querySelectorAll('.mark-line path, .mark-rule line, .mark-rect "
        "path').length])"
    )
    # the forest, the panels of eight outcomes, three costs, the curves of eight arms, two statistics by depth and by
    # step
    assert len(states) == 1 + 8 + 3 + 2 * 8 + 2 * 4
    assert {drawn for drawn, _ in states} == {"yes"}
    assert all(marks > 0 for _, marks in states)


def test_the_forest_plot_has_a_point_for_every_arm_and_a_dot_for_every_seed(visit):
    points = visit.page.locator("#paired-differences .mark-symbol.role-mark path:not([stroke-width='0'])")
    # one run diverged; a column of numbers has a point without a size for each arm
    assert points.evaluate_all("all => all.filter(e => e.getBoundingClientRect().width > 1).length") == 8 + 8 * 10 - 1
    legend = visit.page.locator("#paired-differences .role-legend-label text").all_text_contents()
    assert legend == ["better", "worse", "no evidence"]


# Vega hides a label of an axis for which there is no room
BOXES = (
    "all => all.filter(e => getComputedStyle(e).opacity > 0).map(e => e.getBoundingClientRect())"
    ".map(b => [b.left, b.top, b.right, b.bottom])"
)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("section", ["paired-differences", "all-outcomes", "outcome-against-cost"])
def test_labels_and_numbers_stand_in_columns_of_their_own(browser, report, width, section):
    """No text lies on a point, an interval, or another text."""
    seen = Visit(browser, report, width=width)
    for figure in seen.page.locator(f"#{section} figure").all():
        texts = figure.locator(".role-axis-label text").evaluate_all(BOXES)
        marks = figure.locator(".role-mark :is(path, line)").evaluate_all(BOXES)
        marks = [mark for mark in marks if mark[2] - mark[0] > 1]
        touching = [(t, m) for t in texts for m in marks if _overlap(t, m)]
        touching += [(a, b) for at, a in enumerate(texts) for b in texts[at + 1 :] if _overlap(a, b)]
        assert len(texts) > 8 and marks and not touching, figure.get_attribute("id")


def _overlap(one, other) -> bool:
    # lines of text touch each other by a pixel
    return one[0] < other[2] - 1 and other[0] < one[2] - 1 and one[1] < other[3] - 2 and other[1] < one[3] - 2


def test_the_source_of_a_run_is_seen_without_scrolling(visit):
    visit.page.locator("details:has(#runs), #runs details, #runs").first.evaluate(
        "e => (e.closest('details') || e.querySelector('details') || e).open = true"
    )
    right = "e => e.getBoundingClientRect().right"
    box = visit.page.locator("#runs .scroll")
    assert box.locator("td a").first.evaluate(right) <= box.evaluate(right)


def test_a_study_in_which_every_run_diverged_is_quiet_too(browser, tmp_path):
    broken = {(method, seed) for method in NINE[:3] for seed in (0, 1)}
    page = headwise_verdict.reporting.write(write_study(tmp_path, methods=NINE[:3], seeds=2, epochs=3, diverged=broken))
    seen = Visit(browser, page)
    assert seen.messages == []
    assert seen.page.locator("text=no epoch of a run ended with a finite figure").count() == 2


def test_better_is_to_the_right_for_a_loss_too(visit):
    """Of two arms the one with the lower test loss stands farther to the right."""
    figure = visit.page.locator("#figure-differences-in-test-loss")
    titles = figure.locator(".role-axis-title text").all_text_contents()
    assert titles == ["nats, better →"]
    ticks = figure.locator(".role-axis-label text").evaluate_all(
        "all => all.map(e => [e.getBoundingClientRect().left, Number(e.textContent.replace('−', '-'))])"
        ".filter(([_, value]) => !Number.isNaN(value))"
    )
    assert [value for _, value in sorted(ticks)] == sorted((value for _, value in ticks), reverse=True) and len(
        ticks
    ) > 2
    names = figure.locator(".role-axis-label text").all_text_contents()
    assert "InputNoise(scale=0.01,per_head=True)" in names


def test_the_best_outcome_comes_first_among_the_costs(visit):
    texts = visit.page.locator("#outcome-against-cost figure").first.locator(".role-axis-label text")
    named = [text for text in texts.all_text_contents() if not text[0].isdigit()]
    outcomes = [float(text) for text in texts.all_text_contents() if re.fullmatch(r"\d\d\.\d\d", text)]
    assert "DropHead(p=0.2)" in named and "baseline" in named and len(named) == len(outcomes) == 9
    assert outcomes == sorted(outcomes, reverse=True)


def test_a_diverged_run_ends_in_a_cross(visit):
    chart = visit.page.locator("#learning-curves details", has=visit.page.locator("summary", has_text="DropHead"))
    assert chart.locator(".mark-symbol path").count() == 2


def test_a_folded_chart_is_drawn_when_it_is_opened(visit):
    fold = visit.page.locator("#health-of-the-heads details").last
    assert fold.locator("figure[data-drawn=yes]").count() == 0
    fold.locator("summary").click()
    fold.locator("figure[data-drawn=yes]").nth(3).wait_for()
    assert fold.locator(".mark-rect path").count() > 12
    assert visit.messages == []


def test_the_table_sorts_by_click_both_ways(visit):
    heads = visit.answer.locator("thead th").evaluate_all("all => all.map(e => e.dataset.name)")
    at = heads.index("test accuracy")
    button = visit.answer.locator("thead button").nth(at)
    button.click()
    up = [float(text.split()[0]) for text in visit.column(at)]
    assert up == sorted(up)
    button.click()
    down = [float(text.split()[0]) for text in visit.column(at)]
    assert down == sorted(down, reverse=True)
    assert visit.answer.locator("th[aria-sort=descending]").count() == 1


def test_the_table_sorts_by_keyboard_and_keeps_what_is_missing_last(visit):
    button = visit.answer.locator("thead button").nth(1)
    button.focus()
    for _ in range(2):
        visit.page.keyboard.press("Enter")
        assert visit.column(1)[-1] == "–"


def test_a_method_name_with_html_does_no_harm(visit):
    assert visit.page.evaluate("window.harmed") is None
    assert EVIL in "".join(visit.column(0))
    assert visit.page.locator("img").count() == 0


def test_the_page_of_a_study_with_one_seed_is_quiet_too(browser, tmp_path):
    folder = write_study(tmp_path, methods=NINE[:2], seeds=1, epochs=3)
    assert Visit(browser, headwise_verdict.reporting.write(folder)).messages == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_small_screen_needs_no_sideways_scrolling(browser, report, scheme):
    small = Visit(browser, report, width=400, scheme=scheme)
    small.unfold()
    assert small.page.evaluate("document.documentElement.scrollWidth") <= 400
    widths = small.page.locator("figure svg, figure canvas").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().right)"
    )
    assert max(widths) <= 400
    box = small.page.locator(".scroll").first
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")
    assert small.messages == []


def test_charts_follow_a_change_to_dark(browser, report):
    seen = Visit(browser, report)
    label = seen.page.locator("#paired-differences .role-axis-label text").first
    light = label.get_attribute("fill"), seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    seen.page.emulate_media(color_scheme="dark")
    seen.page.wait_for_timeout(1500)
    dark = label.get_attribute("fill"), seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    colours = seen.page.locator("#paired-differences .mark-symbol path").evaluate_all(
        "all => all.map(e => e.getAttribute('fill'))"
    )
    assert colours
    assert not [colour for colour in colours if "var(" in colour]
    assert seen.messages == []


def test_the_difference_and_the_verdict_are_in_sight_on_a_phone(browser, report):
    phone = Visit(browser, report, width=390)
    lead = phone.page.locator(".lead").bounding_box()
    assert lead["y"] + lead["height"] < 844
    cells = phone.answer.locator("tbody tr td:nth-child(2)")
    words = cells.all_inner_texts()
    assert len(words) == 9 and sum("[" in word for word in words) == 8
    assert max(cells.evaluate_all("all => all.map(e => e.getBoundingClientRect().right)")) <= 390
    verdicts = phone.answer.locator("tbody tr td:nth-child(3) .tag")
    better = verdicts.filter(has_text="better")
    assert better.count() and max(better.evaluate_all("all => all.map(e => e.getBoundingClientRect().right)")) <= 390
    assert "no evidence" in verdicts.all_inner_texts()


def test_on_paper_nothing_is_clipped_and_charts_are_drawn_anew(browser, report):
    seen = Visit(browser, report, scheme="dark")
    width = "() => document.querySelector('#paired-differences svg').getBoundingClientRect().width"
    ink = "() => document.querySelector('#paired-differences .role-axis-label text').getAttribute('fill')"
    before = seen.page.evaluate(width), seen.page.evaluate(ink)
    # a printer takes what stands there when the event and its promises are over; it waits for no timer
    kept = "for (let turn = 0; turn < 200; turn++) await null;"
    after = f"async () => {{ dispatchEvent(new Event('beforeprint')); {kept} return [({width})(), ({ink})()]; }}"
    assert seen.page.evaluate(after) == [680, "#4d545e"]
    assert before[0] > 703 and before[1] != "#4d545e"
    # a page of A4
    seen.page.emulate_media(media="print", color_scheme="light")
    seen.page.set_viewport_size({"width": 703, "height": 1000})
    clipped = "all => all.filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1).map(e => e.className)"
    assert seen.page.locator(".scroll, .plot, body").evaluate_all(clipped) == []
    rights = "all => Math.max(...all.filter(e => e.getClientRects().length).map(e => e.getBoundingClientRect().right))"
    assert seen.page.locator("td, th, svg").evaluate_all(rights) < 704
    # the appendix is printed where the reader asks for it
    assert not seen.page.locator("#runs table").is_visible() and not seen.page.locator("nav").is_visible()
    seen.page.evaluate("document.querySelector('#print-appendix').checked = true")
    assert seen.page.locator("#runs table").is_visible()
    seen.page.emulate_media(media="screen", color_scheme="dark")
    seen.page.set_viewport_size({"width": 1280, "height": 900})
    seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
    seen.page.wait_for_function(f"({width})() > 703")
    assert seen.messages == []


def test_heads_of_columns_are_printed_once(browser, tmp_path):
    """What a printer takes from data-name stands in place of a button, not beside a name."""
    claim = {"text": "It helps.", "tests": [{"arm": NINE[1], "outcome": "test/accuracy", "says": "higher"}]}
    folder = write_study(tmp_path, methods=NINE[:2], epochs=3, claims=(claim,))
    seen = Visit(browser, headwise_verdict.reporting.write(folder))
    seen.page.emulate_media(media="print")
    texts = "all => all.map(e => [e.querySelector('button') !== null, getComputedStyle(e, '::before').content])"
    heads = seen.page.locator("thead th").evaluate_all(texts)
    assert {has_button for has_button, _ in heads} == {True, False}
    assert all((content != "none") == has_button for has_button, content in heads)


def test_many_folds_stay_folded_on_paper(browser, report):
    seen = Visit(browser, report)
    print_it = (
        "() => { dispatchEvent(new Event('beforeprint')); return document.querySelectorAll('.added[open]').length; }"
    )
    add = """count => {
        for (let n = 0; n < count; n++) {
            const fold = document.createElement('details');
            fold.className = 'added';
            document.querySelector('main').append(fold);
        }
    }"""
    seen.page.evaluate(add, 3)
    assert seen.page.evaluate(print_it) == 3
    seen.page.evaluate(add, 40)
    assert seen.page.evaluate(print_it) == 3


def test_the_answer_its_plot_and_its_table_are_printed_on_the_first_page(browser, tmp_path):
    methods = (*NINE, "NeuTRENO(strength=0.6) @ 2-5 | learning_rate=0.001")
    seen = Visit(browser, headwise_verdict.reporting.write(write_study(tmp_path, methods=methods, epochs=3)))
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    seen.page.emulate_media(media="print", color_scheme="light")
    seen.page.set_viewport_size({"width": 703, "height": 1000})
    # A4 without its margins, at this width
    bottom = "e => e.getBoundingClientRect().bottom + scrollY"
    assert seen.page.locator("#result table").evaluate(bottom) < 703 * (297 - 20) / (210 - 24)


RATES = [
    f"{start} | learning_rate={rate}"
    for start in ("baseline", "SigmaReparam()")
    for rate in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
]
LONG = [
    f'SigmaReparam(init="one", layers="all") + NeuTRENO(strength=0.{at}) @ encoder 2-5 | learning_rate=0.0{at}'
    for at in range(1, 10)
]


def printed(browser, folder) -> Visit:
    """Open a report as it is printed on A4, whose margins leave 703 pixels."""
    seen = Visit(browser, headwise_verdict.reporting.write(folder))
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    seen.page.emulate_media(media="print", color_scheme="light")
    seen.page.set_viewport_size({"width": 703, "height": 1000})
    return seen


def test_a_printed_head_stays_with_its_first_row_and_what_was_published_has_room(browser, tmp_path):
    claim = {"text": "It helps.", "tests": [{"arm": NINE[1], "outcome": "test/accuracy", "says": "higher"}]}
    seen = printed(browser, write_study(tmp_path, methods=NINE[:2], epochs=3, claims=(claim,)))
    claims = seen.page.locator("#claims table")
    breaks = (
        "e => [getComputedStyle(e.caption).breakAfter, getComputedStyle(e.tHead).breakAfter, "
        "getComputedStyle(e.tBodies[0].rows[0]).breakBefore]"
    )
    assert claims.evaluate(breaks) == ["avoid"] * 3
    widths = claims.locator("thead th").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert len(widths) == 4 and widths[2] > 0.19 * sum(widths)


@pytest.mark.parametrize("methods", [LONG, pytest.param(RATES, marks=pytest.mark.grid)])
def test_long_names_and_diverged_sweeps_leave_the_table_on_the_first_page(browser, tmp_path, methods):
    diverged = {(RATES[-1], seed) for seed in range(6)} | {(RATES[4], seed) for seed in range(10)}
    seen = printed(browser, write_study(tmp_path, methods=("baseline", *methods), epochs=3, diverged=diverged))
    bottom = "e => e.getBoundingClientRect().bottom + scrollY"
    assert seen.page.locator("#result table").evaluate(bottom) < 703 * (297 - 20) / (210 - 24)
    names = seen.column(0)
    assert len(set(names)) == len(names) == 1 + len(methods)
    told = seen.page.locator("#result .pairs dd").all_inner_texts()
    assert set(methods) <= {*names, *told}


@pytest.mark.grid
def test_of_thirty_arms_the_plot_is_printed_on_the_first_page(browser, tmp_path):
    arms = [f"DropHead(p=0.{at})" for at in range(10, 40)]
    seen = printed(browser, write_study(tmp_path, methods=("baseline", *arms), seeds=6, epochs=3))
    bottom = "e => e.getBoundingClientRect().bottom + scrollY"
    assert seen.page.locator("#paired-differences figcaption").evaluate(bottom) < 703 * (297 - 20) / (210 - 24)


def test_names_are_told_apart_in_the_plot_on_a_phone_and_no_number_is_broken(browser, tmp_path):
    phone = Visit(
        browser, headwise_verdict.reporting.write(write_study(tmp_path, methods=("baseline", *LONG), epochs=3)), 390
    )
    labels = phone.page.locator("#paired-differences .role-axis-label text").all_text_contents()
    names = {label for label in labels if "SigmaReparam" in label}
    assert len(names) == len(LONG) and not [name for name in names if name.endswith("…")]
    heading = phone.answer.locator("tbody th").nth(1)
    assert heading.inner_html().count("=<wbr>") == 5 and phone.column(0)[1] in LONG


def saved(visit, button) -> str:
    with visit.page.expect_download() as waiting:
        button.click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def test_figures_and_tables_are_saved_from_the_page(browser, report):
    seen = Visit(browser, report)
    forest = seen.page.locator("#paired-differences figure")
    name, svg = saved(seen, forest.locator("button[data-save=svg]"))
    assert name == "paired-differences-in-test-accuracy.svg" and svg.startswith(b"<svg") and b"DropColumn" in svg
    name, png = saved(seen, forest.locator("button[data-save=png]"))
    assert name.endswith(".png") and png[:4] == b"\x89PNG" and len(png) > 10_000
    name, table = saved(seen, seen.page.locator("#result button[data-save=csv]"))
    lines = list(csv.reader(table.decode().splitlines()))
    assert name == "every-arm-against-the-baseline.csv" and len(lines) == 10 and len({len(line) for line in lines}) == 1
    assert lines[0][0] == "arm" and lines[1][0] == "baseline" and abs(float(lines[2][1])) < 1
    _, tex = saved(seen, seen.page.locator("#result button[data-save=tex]"))
    assert tex.decode().count(r"\\") == 10 and r"\%" in tex.decode()
    assert seen.messages == []


def test_without_scripts_the_tables_stand(browser, report):
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(report.as_uri())
    assert page.locator(".lead").is_visible()
    assert page.locator("#result table").is_visible()


def test_a_link_to_a_folded_section_opens_it(browser, report):
    page = browser.new_page()
    page.goto(f"{report.as_uri()}#runs")
    page.wait_for_selector("html[data-charts=ready]")
    assert page.locator("#runs table").is_visible()


def test_every_chart_and_button_has_a_name_for_a_screen_reader(browser, report):
    visit = Visit(browser, report)
    visit.unfold()
    names = visit.page.locator("figure .chart").evaluate_all(
        "all => all.map(e => [e.getAttribute('role'), e.ariaLabel])"
    )
    assert {role for role, _ in names} == {"img", "group"} and all(len(name) > 3 for _, name in names)
    # a box with a slider or a menu is no picture
    grouped = "all => all.every(e => (e.role === 'group') === !!e.querySelector('.vega-bindings :is(input, select)'))"
    assert visit.page.locator("figure[data-chart] .chart").evaluate_all(grouped)
    buttons = visit.page.locator("button[data-save]").evaluate_all("all => all.map(e => e.ariaLabel)")
    assert len(set(buttons)) > 40 and all(name.startswith("Save ") for name in buttons)
