"""The table of smaller heads says what each number is out of."""

from __future__ import annotations

import pytest

from deadweight.compress.result import Compression, Judgement
from deadweight.compress.truncate import KeptDimensions
from deadweight.report.audit_terminal import make_console
from deadweight.report.compression import print_heads


def test_value_heads_that_are_wider_than_key_heads_are_counted_out_of_their_own_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = KeptDimensions(values=(136, 136), non_rotary=(48, 40), pairs=(0, 0))
    judgement = Judgement(tokens=10, error=0.0, what="kl")
    result = Compression("m", "slim", 0.5, {"attn": kept}, {"attn": (64, 192)}, 512, 360, 100, 80, 0.0, judgement, 10)
    print_heads(result, make_console())
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert head.split() == ["attention", "key", "dimensions", "kept", "of", "value", "dimensions", "kept", "of"]
    assert row.split() == ["attn", "48", "40", "64", "136", "192"]
