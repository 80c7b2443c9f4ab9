"""What can become of a type, in words; imported without torch."""

from __future__ import annotations

WORDS = {
    "proofs": "proofs",
    "clean": "traced, no law applies",
    "evidence": "evidence only (gradients, no proof)",
    "nothing": "not audited",
    "crash": "crash (a bug of ours)",
    "timeout": "out of time or memory",
}
