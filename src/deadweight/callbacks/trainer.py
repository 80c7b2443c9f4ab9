"""For `transformers.Trainer`: `Trainer(..., callbacks=[AuditCallback()])`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from deadweight.callbacks.once import ROWS, OneAudit, example_of


class AuditCallback(OneAudit, TrainerCallback):
    """Audits the model before the first step, and warns (or stops) if parameters cannot learn.

    The example inputs are a few rows of the first batch, unless `inputs` are given.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """transformers calls this with the model and its data."""
        if self.action == "warn" and not state.is_world_process_zero:
            return  # one warning is enough; but every process must stop
        model = options["model"]
        inputs = self.inputs if self.inputs is not None else example_of(model, first_batch(options["train_dataloader"]))
        self.audit_once(model, inputs)


def first_batch(loader: Any) -> Any:
    """Two rows of the data as the model reads them. The sampler is left alone: training sees the same order."""
    with torch.random.fork_rng():
        try:
            return loader.collate_fn([loader.dataset[i] for i in range(ROWS)])
        except (TypeError, AttributeError, IndexError, KeyError, NotImplementedError):  # a stream, or a single row
            return next(iter(loader))
