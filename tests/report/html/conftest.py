"""What the tests of the pages share: audits to show."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import deadweight
from deadweight.audit.result import Audit, Unknown
from deadweight.report.audit_json import as_text, to_json
from deadweight.report.html.audit_page import render_audit
from deadweight.report.html.render import render_html

from .parts import HOSTILE, hostile_finding, many_findings


@pytest.fixture(scope="session")
def demo_audit() -> Audit:
    return deadweight.audit("demo", complete=True)


@pytest.fixture(scope="session")
def hostile_audit() -> Audit:
    """Every text that comes from a model or its libraries is hostile."""
    findings = tuple(hostile_finding(name) for name in HOSTILE)
    unknown = tuple(Unknown(name, name, name) for name in HOSTILE)
    shapes = tuple((name, (4, 4)) for name in HOSTILE)
    return Audit(HOSTILE[0], 160, findings, unknown, notes=HOSTILE, untraced=HOSTILE[1], shapes=shapes)


@pytest.fixture(scope="session")
def many_alike() -> str:
    """The page of 20,000 findings in repeated blocks."""
    return render_audit(many_findings(20_000, alike=True))


@pytest.fixture(scope="session")
def many_different() -> str:
    """The page of 20,000 findings of which no two are alike: 10 MB of JSON."""
    audit = many_findings(20_000, alike=False)
    assert len(as_text(to_json(audit))) > 10_000_000
    return render_audit(audit)


@pytest.fixture(scope="session")
def page_of_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Audit, str]]:
    """The audit of a well-known config, and its page; each is made once."""
    configs = json.loads((Path(__file__).parent / "configs.json").read_text(encoding="utf-8"))

    @cache
    def page(name: str) -> tuple[Audit, str]:
        file = tmp_path_factory.mktemp(name) / "config.json"
        file.write_text(json.dumps(configs[name]), encoding="utf-8")
        audit = deadweight.audit(str(file))
        return audit, render_html(audit)

    return page
