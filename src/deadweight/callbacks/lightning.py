"""For Lightning: `Trainer(callbacks=[AuditCallback()])`. Needs `lightning` or `pytorch_lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deadweight.callbacks.once import OneAudit, example_of
from deadweight.errors import DeadweightError

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise DeadweightError(
                "neither lightning nor pytorch_lightning is installed; expected one of them: pip install lightning"
            ) from error


class AuditCallback(OneAudit, Callback):
    """Audits the module before the first step, and warns (or stops) if parameters cannot learn.

    The example inputs are `inputs`, else the module's `example_input_array`, else a few rows of the first batch.
    """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Lightning calls this before every step; the audit runs before the first."""
        if self.result is not None or (self.action == "warn" and not trainer.is_global_zero):
            return  # one warning is enough; but every process must stop
        given = [i for i in (self.inputs, getattr(pl_module, "example_input_array", None)) if i is not None]
        self.audit_once(pl_module, given[0] if given else example_of(pl_module, batch))
