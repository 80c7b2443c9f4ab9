"""The pages in a real Chromium: clicks, keys, filters, links, dark mode, printing; nothing fetched, no error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from deadweight.audit.result import Audit
from deadweight.reduce.run import reduce
from deadweight.report.html.audit_page import render_audit
from deadweight.report.html.render import render_html

from .parts import CONFIGS

By = pytest.importorskip("selenium.webdriver.common.by", reason="selenium is not installed: make setup").By
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
Wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait

Open = Callable[..., Any]
PATIENCE = 60  # seconds until a page must be ready, on any machine


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Open:
    """Open a page in the browser, and wait until its script has run; afterwards its log must be clean."""

    def show(html: str, address: str = "", name: str = "page.html") -> Any:
        file = tmp_path / name
        file.write_text(html, encoding="utf-8")
        browser.get("about:blank")
        browser.get_log("browser"), browser.get_log("performance")
        browser.get(f"{file.as_uri()}{address}")
        Wait(browser, PATIENCE).until(lambda b: b.execute_script("return document.body.dataset.ready") == "true")
        return browser

    yield show
    assert browser.get_log("browser") == []
    assert [url for url in requests_of(browser) if not url.startswith(("file:", "about:", "data:"))] == []


def requests_of(browser: Any) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def rows(browser: Any) -> list[str]:
    return [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#table tbody tr")]


def find(browser: Any, selector: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, selector)


def sheet_is_open(browser: Any) -> bool:
    return browser.execute_script("return document.getElementById('sheet').open")


def wait_for(browser: Any, condition: Callable[[Any], bool]) -> None:
    """A page follows a new address, and closes its sheet, a moment after the click."""
    Wait(browser, PATIENCE).until(condition)


@pytest.fixture(scope="module")
def demo_page(demo_audit: Audit) -> str:
    return render_audit(demo_audit)


def test_a_click_on_a_finding_shows_its_law_proof_evidence_and_command(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    link = next(a for a in page.find_elements(By.CSS_SELECTOR, "a.open") if "c_attn.bias[192:384]" in a.text)
    link.click()
    wait_for(page, sheet_is_open)
    text = find(page, "#sheet-body").text
    assert "Adding one vector to all keys adds the same number to all scores" in text
    assert "192 of 192 numbers" in text
    assert "times as much as a random change of all parameters" in text
    assert "deadweight reduce demo OUT --select DW002" in text
    steps = page.find_elements(By.CSS_SELECTOR, ".proof li")
    assert "transformer.h.0.attn.c_attn.bias" in steps[0].text
    assert "softmax" in steps[-1].text
    circles = page.find_elements(By.CSS_SELECTOR, ".proof circle")
    assert len(circles) == len(steps)
    assert [c.get_attribute("class") for c in (circles[0], circles[-1])] == ["start", "end"]


def test_the_lines_of_a_proof_join_each_step_with_what_it_reads(show: Open, demo_page: str, demo_audit: Audit) -> None:
    finding = next(f for f in demo_audit.findings if f.code == "DW014")
    page = show(demo_page, f"#finding={quote('DW014:transformer.wte.weight')}")
    paths = page.find_elements(By.CSS_SELECTOR, ".proof path")
    assert len(paths) == sum(len(v.reads) for v in finding.walk) > len(finding.walk) - 3


def test_no_line_of_a_proof_runs_through_a_step_that_it_does_not_join(
    show: Open, demo_page: str, demo_audit: Audit
) -> None:
    page = show(demo_page)
    for walk in {f.walk for f in demo_audit.findings}:
        steps = [{"reads": list(v.reads)} for v in walk]
        lanes = page.execute_script("return assignLanes(arguments[0])", steps)
        lines = [(j, i) for i, v in enumerate(walk) for j in v.reads]
        assert all(lanes[k] != lanes[j] for j, i in lines for k in range(j + 1, i))


def test_an_address_opens_its_finding_and_closing_returns_to_the_table(show: Open, demo_page: str) -> None:
    page = show(demo_page, f"#finding={quote('DW002:transformer.h.2.attn.c_attn.bias[192:384]')}")
    assert find(page, "#sheet-title").text == "transformer.h.2.attn.c_attn.bias[192:384]"
    assert "h.2." in find(page, ".proof li").text
    assert quote("DW002:transformer.h.2", safe=":") in find(page, "#permalink").get_attribute("href").replace(
        "%3A", ":"
    )
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait_for(page, lambda b: not sheet_is_open(b) and "finding=" not in b.current_url)


def test_an_address_without_a_finding_says_so(show: Open, demo_page: str) -> None:
    page = show(demo_page, "#finding=DW002:gone")
    assert not sheet_is_open(page)
    assert "has no finding DW002:gone" in find(page, "#shown").text


def test_filters_narrow_the_table_and_are_in_the_address(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    every = len(rows(page))
    find(page, "#query").send_keys("dw006 gauge")
    assert every > len(rows(page)) == 2
    assert all("DW006" in row and "gauge" in row for row in rows(page))
    assert page.current_url.endswith("#filter=dw006%20gauge")
    find(page, "#clear").click()
    assert len(rows(page)) == every


def test_a_star_stands_for_a_block_number_and_odd_signs_for_themselves(show: Open, demo_page: str) -> None:
    page = show(demo_page, f"#filter={quote('h.*.ln_1.bias')}")
    assert [r for r in rows(page) if "ln_1.bias" not in r] == []
    assert len(rows(page)) == 1
    page = show(demo_page, f"#filter={quote('([+')}")
    assert rows(page) == []


def test_verdict_buttons_filter_and_tell_that_they_are_pressed(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    button = find(page, ".toggle[data-word=folds]")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert all("folds" in row for row in rows(page))
    find(page, ".toggle[data-word=dead]").click()  # one verdict at a time
    assert all("dead" in row for row in rows(page))
    assert button.get_attribute("aria-pressed") == "false"


def test_rows_are_sorted_on_request(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    find(page, "#order option[value=dof]").click()
    counts = page.find_elements(By.CSS_SELECTOR, "#table tbody tr td:nth-child(4)")
    numbers = [int(c.text.replace(",", "")) for c in counts]
    assert numbers == sorted(numbers, reverse=True)


def test_a_parameter_of_the_drawing_leads_to_its_findings(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    find(page, '.cell a[title^="transformer.h.*.ln_2.bias"]').click()
    wait_for(page, lambda b: find(b, "#query").get_attribute("value") == "transformer.h.*.ln_2.bias")
    assert len(rows(page)) == 1


def test_everything_can_be_done_with_the_keyboard(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    find(page, "body").send_keys("/")
    assert page.switch_to.active_element.get_attribute("id") == "query"
    page.switch_to.active_element.send_keys("dead", Keys.ARROW_DOWN)
    page.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    second = page.switch_to.active_element
    assert second.text == page.find_elements(By.CSS_SELECTOR, "a.open")[1].text
    second.send_keys(Keys.ENTER)
    wait_for(page, sheet_is_open)
    first_title = find(page, "#sheet-title").text
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    title = "return document.getElementById('sheet-title').textContent"
    wait_for(page, lambda b: b.execute_script(title) != first_title)
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    focused = "return document.activeElement.className"
    wait_for(page, lambda b: not sheet_is_open(b) and "open" in b.execute_script(focused))


@pytest.mark.parametrize("address", ["", f"#finding={quote('DW002:transformer.h.0.attn.c_attn.bias[192:384]')}"])
def test_controls_and_pictures_have_names_for_screen_readers(show: Open, demo_page: str, address: str) -> None:
    page = show(demo_page, address)
    tree = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    nameless = [
        node["role"]["value"]
        for node in tree
        if not node["ignored"]
        and node["role"]["value"] in ("button", "link", "textbox", "searchbox", "combobox", "img", "dialog", "table")
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []


def test_headings_go_down_one_level_at_a_time(show: Open, demo_page: str) -> None:
    headings = show(demo_page).find_elements(By.CSS_SELECTOR, "h1, h2, h3, h4, h5, h6")
    levels = [int(heading.tag_name[1]) for heading in headings]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


def background(browser: Any) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def prefer(browser: Any, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def test_the_page_is_dark_where_the_reader_prefers_it_and_the_button_changes_it(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    prefer(page, "light")
    light = background(page)
    prefer(page, "dark")
    dark = background(page)
    assert light != dark
    find(page, "#theme").click()
    assert background(page) == light
    find(page, "#theme").click()
    assert background(page) == dark
    prefer(page, "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_letters_have_enough_contrast(show: Open, demo_page: str, scheme: str) -> None:
    page = show(demo_page)
    prefer(page, scheme)
    style = "return getComputedStyle(document.body).getPropertyValue('--{}').trim()"
    colour = {name: page.execute_script(style.format(name)) for name in ("paper", "ink", "dim", "link", "on")}
    assert all(contrast(colour["paper"], colour[name]) >= 4.5 for name in ("ink", "dim", "link"))
    for verdict in ("dead", "folds", "gauge"):
        assert contrast(page.execute_script(style.format(verdict)), colour["on"]) >= 3  # large or bold letters
    prefer(page, "")


def contrast(one: str, other: str) -> float:
    """The ratio of luminances, by the definition of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_the_page_fits_a_phone(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_prints(show: Open, demo_page: str) -> None:
    page = show(demo_page)
    assert page.print_page().startswith("JVBER")  # base64 of %PDF
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not find(page, "form.filter").is_displayed()
    assert find(page, "#table").is_displayed()
    ink = "return getComputedStyle(document.querySelector('.times')).color"
    assert page.execute_script(ink) == "rgb(0, 0, 0)", "browsers leave out backgrounds: white letters would be lost"
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_hostile_names_run_nothing_and_are_shown(show: Open, hostile_audit: Audit) -> None:
    page = show(render_audit(hostile_audit))
    for link in range(len(rows(page))):
        page.execute_script("document.querySelectorAll('a.open')[arguments[0]].click()", link)
        wait_for(page, sheet_is_open)
        page.execute_script("document.getElementById('sheet').close()")
        wait_for(page, lambda b: "finding=" not in b.current_url)
    assert page.title.endswith("· deadweight")
    assert "hacked" not in page.title.replace('document.title="hacked"', "")
    assert page.find_elements(By.CSS_SELECTOR, "#table img, #table script, #sheet img, #sheet script") == []
    text = find(page, "#table").text
    assert "<script>document.title" in text
    assert "\\x1b[31mred" in text
    assert "safe\\u202egnp.exe" in text


def test_findings_that_share_most_of_an_address_open_apart(show: Open, hostile_audit: Audit) -> None:
    page = show(render_audit(hostile_audit))
    links = [a.get_attribute("href") for a in page.find_elements(By.CSS_SELECTOR, "a.open")]
    assert len(set(links)) == len(links)


@pytest.mark.parametrize("which", ["many_alike", "many_different"])
def test_twenty_thousand_findings_are_shown_a_hundred_at_a_time(
    show: Open, which: str, request: pytest.FixtureRequest
) -> None:
    page = show(request.getfixturevalue(which))
    assert "20,000 findings" in find(page, "#shown").text
    shown = len(rows(page))
    assert shown <= 100
    if which == "many_different":
        find(page, "#more").click()
        assert len(page.find_elements(By.CSS_SELECTOR, "#table tbody tr")) == 200
    word = "layers.1234." if which == "many_alike" else "module_12345_"
    find(page, "#query").send_keys(word)
    assert 1 <= len(rows(page)) <= 8
    find(page, "a.open").click()
    wait_for(page, sheet_is_open)
    assert len(page.find_elements(By.CSS_SELECTOR, ".proof li")) in (0, 8)


def test_the_page_of_a_reduction_opens(show: Open) -> None:
    page = show(render_html(reduce("demo", dry_run=True)))
    assert "112,392 of 1,878,144 parameters would go" in find(page, "h1").text
    assert "one number; and it holds only if" in find(page, "main").text


@pytest.fixture
def seconds(show: Open, browser: Any) -> Iterator[Callable[[str], float]]:
    """The processor time that a page takes to open: unlike time on the clock, it does not depend on other programs."""

    def total() -> float:
        metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    def opened(html: str) -> float:
        browser.get("about:blank")
        before = total()
        show(html)
        return total() - before

    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    yield opened
    browser.execute_cdp_cmd("Performance.disable", {})


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_of_a_config_opens_within_a_second(seconds: Callable, page_of_config: Callable, name: str) -> None:
    _, html = page_of_config(name)
    assert 0 < seconds(html) < 1


def test_a_page_that_computes_for_long_is_noticed(seconds: Callable) -> None:
    work = "const end = performance.now() + 2000; while (performance.now() < end);"
    page = "<!doctype html><link rel='icon' href='data:,'><body><script>{}document.body.dataset.ready = true</script>"
    assert seconds(page.format(work)) > seconds(page.format("")) + 0.2, "of two seconds, on any machine"
