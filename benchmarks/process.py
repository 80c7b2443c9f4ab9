"""What one process costs: time and memory, as the operating system counts them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessCost:
    """Wall time, processor time, and the largest resident set in bytes."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def run_process(command: list[str]) -> ProcessCost:
    """Run a command to its end; a command that fails ends the benchmark with what it printed."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {errors.read().decode()[-2000:]}")
    unit = 1 if sys.platform == "darwin" else 1024
    return ProcessCost(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)
