"""Versions and machine, as every record of a measurement states them; needs torch and transformers alone."""

from __future__ import annotations

import os
import platform

import torch
import transformers

from deadweight.version import __version__


def circumstances() -> dict[str, str]:
    """Versions and machine."""
    cpu = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deadweight": __version__,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
    }
