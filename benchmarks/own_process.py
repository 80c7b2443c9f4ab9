"""Examine one model type in a process of its own, with limits of processor time and memory."""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30
MEMORY = 5 * GIB
WAITING = 40  # the longest that a process may live, in limits of its processor time: the machine may be busy
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["coverage", "torch._dynamo", "torch._export.converter", "deadweight.audit.run", "deadweight.compress.run"]
)
Facts = dict[str, Any]


def in_own_process(examine: Callable[[str], Facts], model_type: str, seconds: int) -> Facts:
    """What `examine` finds about a type, with the seconds it took; the error, if it raises or does not end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        process = CONTEXT.Process(target=run_child, args=(examine, model_type, seconds, out))
        process.start()
        process.join(seconds * WAITING)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        if not out.exists():
            return {"error": f"not done after waiting for {seconds * WAITING} s" if late else f"more than {seconds} s"}
        return json.loads(out.read_text(encoding="utf-8"))


def run_child(examine: Callable[[str], Facts], model_type: str, seconds: int, out: Path) -> None:
    """Examine one type and write the result; a failure is a result too."""
    from deadweight.errors import DeadweightError
    from deadweight.graph.trace import TraceError, first_line
    from deadweight.threads import one_thread

    warnings.filterwarnings("ignore")
    start = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (start + seconds, start + seconds + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        with one_thread():
            facts = examine(model_type)
    except (DeadweightError, TraceError) as error:
        facts = {"error": first_line(error)[:300], "ours": True}
    except Exception as error:  # noqa: BLE001 - a stranger's code: every failure is a result here
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {first_line(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
        facts = {"error": text, "ours": False}
    facts["seconds"] = round(time.process_time() - start, 1)
    out.write_text(json.dumps(facts), encoding="utf-8")
