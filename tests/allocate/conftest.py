"""Small models only: a second thread costs them more than it gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deadweight.audit.run import one_thread


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield
