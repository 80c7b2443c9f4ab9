"""What to do, in one line, when plain transformers is about to refuse a slim checkpoint.

transformers reports every tensor that does not fit, in dozens of lines, and raises. Among them is an empty tensor whose
name is SIGN. Where deadweight is imported, the report of such a folder is replaced by how to load it.
"""

from __future__ import annotations

import logging
import re

from deadweight.slim.format import SIGN

LOGGER = "transformers.modeling_utils"  # which reports what did not fit
FOLDER = re.compile(r"LOAD REPORT\S* from: (.+)")


class SlimHint(logging.Filter):
    """Replaces the report about a slim checkpoint; lets everything else through."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if SIGN in message:
            found = FOLDER.search(message)
            folder = repr(found[1].strip()) if found else "OUT"
            record.msg = (
                f"{folder} is a slim checkpoint of deadweight, and no plain class fits its weights: load it with "
                f"deadweight.load({folder}), or with from_pretrained({folder}, trust_remote_code=True)"
            )
            record.args = ()
        return True


def add_slim_hint() -> None:
    logging.getLogger(LOGGER).addFilter(SlimHint())
