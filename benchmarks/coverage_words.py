"""What can become of a type, in words; imported without torch."""

from __future__ import annotations

import re

PATH = re.compile(r"/\S+/config\.json")  # of the folder that an attempt made for itself
NO_CLONE = re.compile(
    r"(?:cannot be built: )?(?:DeadweightError: )?no narrow clone of its config runs: width \d+ fails with "
    r"(?:DeadweightError: )?(?P<first>.*?)(?:; the last attempt fails with .*|; expected .*)?$"
)

WORDS = {
    "proofs": "proofs",
    "clean": "traced, no law applies",
    "evidence": "evidence only (gradients, no proof)",
    "nothing": "not audited",
    "crash": "crash (a bug of ours)",
    "timeout": "out of time or memory",
}
NONE_RUNS = "it ran on none of the example inputs that were tried"


def plain(why: str) -> str:
    """A reason in one line: no folder of ours, and of several attempts at a narrow clone the first error."""
    why = PATH.sub("its config", why)
    before, _, told = why.rpartition("; no evidence could be taken either: ")
    if match := NO_CLONE.match(told):
        return f"{before or NONE_RUNS}; no narrow clone runs either: {match['first']}"
    return why
