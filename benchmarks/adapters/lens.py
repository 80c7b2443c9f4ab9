"""TransformerLens: a bridge to the Hugging Face model, then the weight processing of its compatibility mode."""

from __future__ import annotations

import warnings

from job import Job, NotSupported, full_precision, load_hugging, save_state, serve
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge


def work(job: Job) -> dict[str, Tensor]:
    if job.kind == "conv":
        raise NotSupported("no transformer")
    inputs = job.read_inputs()
    given = {"hf_model": load_hugging(job, job.model)} if job.kind == "encoder" else {}
    with job.timed():
        bridge = TransformerBridge.boot_transformers(str(job.model), device="cpu", dtype=job.dtype, **given)
    bridge.eval()
    control = run(job, bridge, inputs)
    with warnings.catch_warnings(record=True) as said, job.timed():
        warnings.simplefilter("always", UserWarning)
        bridge.enable_compatibility_mode(center_unembed=job.variant != "uncentred")
    job.notes += list(dict.fromkeys(str(w.message).splitlines()[0] for w in said if w.category is UserWarning))
    save_state(bridge.state_dict(), job.result)
    return {"output": run(job, bridge, inputs), "control": control}


def run(job: Job, bridge: nn.Module, inputs: Tensor) -> Tensor:
    with full_precision(job.dtype):
        return bridge(inputs, return_type="logits")


if __name__ == "__main__":
    serve(work, ("transformer-lens",))
