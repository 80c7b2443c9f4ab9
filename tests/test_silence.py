"""Loggers of other libraries are silenced, and get their levels back."""

from __future__ import annotations

import logging
import warnings

import pytest

from deadweight.silence import silenced, without_jit_warnings

NAMES = ("deadweight.tests.one", "deadweight.tests.two")


def test_silenced_loggers_are_quiet_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with silenced(*NAMES):
        for name in (*NAMES, "deadweight.tests.three"):
            logging.getLogger(name).error("from %s", name)
    assert caplog.messages == ["from deadweight.tests.three"]


def test_levels_come_back_after_an_error() -> None:
    logging.getLogger(NAMES[0]).setLevel(logging.INFO)
    with pytest.raises(KeyError), silenced(*NAMES):
        raise KeyError
    assert [logging.getLogger(name).level for name in NAMES] == [logging.INFO, logging.NOTSET]


def test_a_logger_below_with_a_level_of_its_own_is_silenced_too(caplog: pytest.LogCaptureFixture) -> None:
    below = logging.getLogger("deadweight.tests.above.below")
    below.setLevel(logging.DEBUG)
    with silenced("deadweight.tests.above"):
        below.debug("unheard")
    below.debug("heard")
    assert caplog.messages == ["heard"] and below.level == logging.DEBUG


def test_only_warnings_about_torch_jit_are_hidden(recwarn: pytest.WarningsRecorder) -> None:
    with without_jit_warnings():
        warnings.warn("`torch.jit.script` is deprecated.", DeprecationWarning, stacklevel=1)
        warnings.warn("something else", DeprecationWarning, stacklevel=1)
    assert [str(w.message) for w in recwarn] == ["something else"]
