"""One thread: the models are tiny, and more threads only wait for each other."""

from __future__ import annotations

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
