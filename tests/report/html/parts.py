"""Audits with hostile names and with many findings, and how the data of a page is read."""

from __future__ import annotations

import base64
import json
import re
import zlib

import pytest

from deadweight.audit.result import Audit, Finding, Visit

LIMIT = 1_000_000  # bytes of a page
LARGER = ("bert-base", "SmolLM2-135M", "Mixtral-8x7B", "Llama-3.1-405B")  # the same code as for gpt2
CONFIGS = ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)]
HOSTILE = (
    '<script>document.title="hacked"</script>',
    '"><img src=x onerror=document.title="hacked">',
    "</script><script>document.title='hacked'</script>",
    "\x1b[31mred\x1b[0m\x07",
    "safe\u202egnp.exe",
    "h.0.\u200f\u05d0\u05d1.weight",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "a" * 5000,
    "new\nline\tand\x00nul",
)


def hostile_finding(name: str) -> Finding:
    walk = (Visit(name, name, name, name), Visit(name, "aten.add", name, name, (0,), (name,)))
    return Finding(
        "DW002", name, name, None, 16, 16, "dead", (name,), "real", (name, name), 1e-17, note=name, walk=walk
    )


def many_findings(n: int, *, alike: bool) -> Audit:
    """`alike`: layers that collapse into few rows. Otherwise no two parameters share a pattern, and no two proofs."""
    findings = tuple(one_of_many(i, alike=alike) for i in range(n))
    return Audit("many", 1_000_000_000, findings, shapes=tuple((f.parameter, (64,)) for f in findings))


def one_of_many(i: int, *, alike: bool) -> Finding:
    name = f"layers.{i // 8}.part_{i % 8}.bias" if alike else f"module_{i:05d}_{i * 7919 % 99991}.sub.bias"
    place = "" if alike else f" at place {i} of {i * 104729 % 99991}"
    lines = tuple(f"{name} [aten.add]: summands add{place} in step {k} → shifted equally" for k in range(8))
    walk = tuple(
        Visit(
            f"add_{k}", "aten.add", f"Shifts of summands add{place}", "shifted equally", (k - 1,) if k else (), (name,)
        )
        for k in range(8)
    )
    return Finding("DW002", "key-bias", name, None, 64, 64, "dead", (), "real", lines, 1e-17 * (i % 97), walk=walk)


def data_of(html: str) -> dict:
    """The packed findings of a page."""
    packed = re.search(r'id="data"[^>]*>([^<]*)<', html)
    assert packed is not None
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


def key_bias(layer: int) -> Finding:
    """Of one layer: eight elements of its fused bias are dead."""
    return Finding("DW002", "key-bias", f"h.{layer}.attn.c_attn.bias", ((8, 16),), 8, 8, "dead", (), "real", ("one",))
