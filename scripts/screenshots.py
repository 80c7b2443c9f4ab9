"""Screenshots of the HTML pages for the documentation, and how large the pages are and how fast they open.

    python scripts/screenshots.py            needs chromium, chromedriver and selenium; writes docs/screenshots.md

Pages are made of the embedded model and of bare configs, so nothing is downloaded.
"""

from __future__ import annotations

import io
import json
import shutil
import statistics
import tempfile
from base64 import b64decode
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

import deadweight
from deadweight.report.html.render import Result, render_html

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "screenshots"
CONFIGS = ROOT / "tests" / "report" / "html" / "configs.json"
LARGEST = 200_000  # bytes of a picture
TIMES = 5  # a page is opened; the median counts


@dataclass(frozen=True)
class Shot:
    """One picture: of which page, at which address, how wide, in which theme, and where it begins."""

    name: str
    page: str
    text: str
    address: str = ""
    width: int = 1280
    height: int = 900
    dark: bool = False
    scroll_to: str = ""


KEY_BIAS = f"#finding={quote('DW002:transformer.h.0.attn.c_attn.bias[192:384]')}"
RESIDUAL = f"#finding={quote('DW012:model.layers.0.self_attn.o_proj.weight')}"
SHOTS = (
    Shot("audit", "demo", "The first screen of `deadweight audit demo --complete --html demo.html`."),
    Shot("model", "gpt2", "The model as its blocks, equal ones drawn once; GPT-2, dark.", scroll_to="model", dark=True),
    Shot("proof", "demo", "One finding: its law, evidence, what to do, and its proof.", KEY_BIAS, height=1150),
    Shot(
        "stream",
        "Mixtral-8x7B",
        "A proof about the residual stream: the graph beside its steps.",
        RESIDUAL,
        height=1500,
    ),
    Shot(
        "findings", "Llama-3.1-405B", "The findings of a config of 405 B parameters.", scroll_to="findings", height=760
    ),
    Shot("phone", "demo", "The same page on a phone.", width=390, height=844),
    Shot("reduce", "reduce", "`deadweight reduce demo slim --html reduce.html`.", height=1000),
    Shot(
        "saturation", "saturation", "`deadweight saturation demo --html saturation.html`, dark.", height=1150, dark=True
    ),
    Shot("cache", "compress", "`deadweight compress demo out --html cache.html`.", height=900),
)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    browser = open_browser()
    try:
        with tempfile.TemporaryDirectory() as folder:
            pages = write_pages(Path(folder))
            for shot in SHOTS:
                take(browser, shot, pages[shot.page])
            rows = [measure(browser, name, file) for name, file in pages.items()]
    finally:
        browser.quit()
    (ROOT / "docs" / "screenshots.md").write_text(page_text(rows), encoding="utf-8")


def open_browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def write_pages(folder: Path) -> dict[str, Path]:
    """The pages by name."""
    results: dict[str, Result] = {"demo": deadweight.audit("demo", complete=True)}
    for name, config in json.loads(CONFIGS.read_text(encoding="utf-8")).items():
        file = folder / name / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps(config), encoding="utf-8")
        results[name] = replace_model(deadweight.audit(str(file)), name)
    results["reduce"] = deadweight.reduce("demo", folder / "slim")
    results["saturation"] = deadweight.saturation("demo", windows=4)
    results["compress"] = deadweight.compress("demo", folder / "out", keep_kv=0.25, windows=8)
    results["evaluate"] = deadweight.evaluate(str(folder / "slim"), "embedded", against="demo", limit=20_000)
    pages = {}
    for name, result in results.items():
        pages[name] = folder / f"{name}.html"
        pages[name].write_text(render_html(result), encoding="utf-8")
    return pages


def replace_model(audit: deadweight.Audit, name: str) -> deadweight.Audit:
    """The same audit without the path of a temporary folder."""
    return replace(audit, model=f"{name}/config.json")


def show(browser: webdriver.Chrome, shot: Shot, file: Path) -> None:
    size = {"width": shot.width, "height": shot.height, "deviceScaleFactor": 1, "mobile": shot.width < 600}
    scheme = {"name": "prefers-color-scheme", "value": "dark" if shot.dark else "light"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get("about:blank")
    browser.get(f"{file.as_uri()}{shot.address}")
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.body.dataset.ready") == "true")
    browser.execute_script("document.getElementById(arguments[0])?.scrollIntoView()", shot.scroll_to)


def take(browser: webdriver.Chrome, shot: Shot, file: Path) -> None:
    """Save a picture in as few bytes as its colours allow."""
    show(browser, shot, file)
    png = b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"])
    out = FOLDER / f"{shot.name}.png"
    colours = Image.open(io.BytesIO(png)).convert("RGB")
    few = colours.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # keeps rare colours
    few.save(out, optimize=True)
    assert out.stat().st_size < LARGEST, (out, out.stat().st_size)


def measure(browser: webdriver.Chrome, name: str, file: Path) -> tuple[str, int, float]:
    """The bytes of a page, and the milliseconds from opening it until its script has finished."""
    times = []
    for _ in range(TIMES):
        show(browser, Shot(name, name, ""), file)
        times.append(browser.execute_script("return performance.getEntriesByName('ready')[0].startTime"))
    return name, file.stat().st_size, statistics.median(times)


PAGE = """# What the HTML pages look like

This page shows what `--html FILE` writes for `audit`, `reduce`, `compress`, `saturation` and `evaluate`. Each page is
one file: it loads nothing, sends nothing, and can be mailed or kept beside a checkpoint. Every page here weighs less
than 1 MB and opens in less than a second.

Verdicts differ in colour, in pattern and by a letter. Every finding has an address (`#finding=…`), and so has every
filter (`#filter=dead`). In a notebook, the value that `deadweight.audit(…)` returns shows its first screen, its table
and its proofs.

{pictures}
## Size and speed

Milliseconds from opening a page until its script has finished, the median of {times} times in Chromium on two shared
CPU cores. Written by `scripts/screenshots.py`, as are the pictures. The configs have the sizes of the public models.

| page | bytes | ms |
| --- | --- | --- |
{rows}
"""


def page_text(rows: list[tuple[str, int, float]]) -> str:
    pictures = "\n".join(f"{shot.text}\n\n![{shot.text}](screenshots/{shot.name}.png)\n" for shot in SHOTS)
    lines = "\n".join(f"| {name} | {size:,} | {ms:.0f} |" for name, size, ms in rows)
    return PAGE.format(pictures=pictures, times=TIMES, rows=lines)


if __name__ == "__main__":
    main()
