"""transformer-tricks: FlashNorm, which merges the gains of norms into the projections behind them."""

from __future__ import annotations

import transformer_tricks
from job import Job, NotSupported, load_hugging, run_hugging, serve
from torch import Tensor


def work(job: Job) -> dict[str, Tensor]:
    if job.kind == "conv":
        raise NotSupported("no transformer")
    module = load_hugging(job, job.model)
    if not hasattr(module.config, "rms_norm_eps"):
        raise NotSupported("its documentation asks for a model with RMSNorm")
    inputs = job.read_inputs()
    control = run_hugging(module, inputs)
    transformer_tricks.repo_exists = lambda _: False  # it asks the hub first; a folder is no repository there
    with job.timed():
        transformer_tricks.flashify_repo(str(job.model), dir=str(job.result), strict=job.variant == "strict")
    # With norms that are gone, plain transformers sets new ones to their initial value.
    return {"output": run_hugging(load_hugging(job, job.result), inputs), "control": control}


if __name__ == "__main__":
    serve(work, ("transformer-tricks",))
