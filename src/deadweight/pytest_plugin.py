"""For pytest: `--deadweight` adds a test for every target in pyproject.toml, and a fixture checks a model.

    def test_my_model_wastes_nothing(assert_no_deadweight):
        assert_no_deadweight(MyModel(), (tokens,), ignore=["DW005"])

pytest loads this file in every project where deadweight is installed: it imports nothing large before it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from deadweight.lint.settings import LintSettings, Target

OPTION = "--deadweight"


def pytest_addoption(parser: pytest.Parser) -> None:
    """One flag."""
    words = "audit the targets of [tool.deadweight] in pyproject.toml, one test each"
    parser.getgroup("deadweight").addoption(OPTION, action="store_true", help=words)


@pytest.fixture
def assert_no_deadweight() -> Callable[..., None]:
    """`deadweight.testing.assert_no_deadweight`: fails with a readable list if a model has redundant parameters."""
    from deadweight.testing import assert_no_deadweight as check

    return check


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the targets after all other tests."""
    if not config.getoption(OPTION):
        return
    from deadweight.errors import DeadweightError
    from deadweight.lint.settings import read_settings

    try:
        settings = read_settings(config.rootpath)
    except DeadweightError as error:
        raise pytest.UsageError(str(error)) from error
    if not settings.targets:
        raise pytest.UsageError(f"{OPTION}: {config.rootpath / 'pyproject.toml'} has no targets in [tool.deadweight]")
    items.extend(
        ModelTest.from_parent(session, name=f"deadweight::{target.model}", target=target, settings=settings)
        for target in settings.targets
    )


class ModelTest(pytest.Item):
    """The check of one target."""

    def __init__(self, *, target: Target, settings: LintSettings, **options: Any) -> None:
        super().__init__(**options)
        self.target, self.settings = target, settings

    def runtest(self) -> None:
        from dataclasses import replace

        from deadweight.lint.check import check_targets
        from deadweight.report.check import failing_lines, summary

        with contextlib.chdir(self.config.rootpath):  # where the callables of targets are importable
            check = check_targets(replace(self.settings, targets=(self.target,)))
            unaudited = [m.audit.unaudited for m in check.models if m.audit.unaudited is not None]
            if unaudited:
                raise CheckError(f"{self.target.model} could not be audited: {unaudited[0]}")
            if check.failed:  # nothing about idle entries of `accept`: they may be for another target
                raise CheckError("\n".join([*failing_lines(replace(check, idle=())), summary(check)]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The list alone: a traceback through deadweight says nothing about the model."""
        from deadweight.errors import DeadweightError

        if isinstance(excinfo.value, (CheckError, DeadweightError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.config.rootpath / "pyproject.toml", None, self.name


class CheckError(AssertionError):
    """The check of a target fails."""
