"""Was a model trained on the text that it is judged on? Our own checkpoints record what they have read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from deadweight.train.result import RESULT


def seen_share(model: str, text: bytes, n_judged: int) -> float | None:
    """Which share of the first `n_judged` bytes the model was trained on; None without a record of its training.

    The record lies in the folder that `deadweight train` wrote, and is copied into what is made of it. A text is
    recognised if it begins with the whole training text, as a file does whose end was held out.
    """
    try:
        record = json.loads((Path(model) / RESULT).read_text(encoding="utf-8"))
        n_bytes, digest = int(record["text_bytes"]), str(record["text_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    seen = bool(digest) and hashlib.sha256(text[:n_bytes]).hexdigest() == digest
    return min(n_bytes, n_judged) / n_judged if seen else 0.0
