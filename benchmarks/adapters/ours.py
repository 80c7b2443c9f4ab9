"""deadweight itself, through the same interface as the other tools."""

from __future__ import annotations

from job import Job, load_hugging, run_hugging, serve
from nets import small_net
from safetensors.torch import load_file
from torch import Tensor

import deadweight


def work(job: Job) -> dict[str, Tensor]:
    inputs = job.read_inputs()
    if job.kind == "conv":
        net = small_net().to(job.dtype).eval()
        net.load_state_dict(load_file(job.model / "model.safetensors"))
        control = net(inputs)
        with job.timed():
            deadweight.reduce(net, job.result, layout=job.variant, inputs=(inputs,))
        return {"output": deadweight.load(job.result, module=small_net().to(job.dtype))(inputs), "control": control}
    control = run_hugging(load_hugging(job, job.model), inputs)
    with job.timed():
        result = deadweight.reduce(job.model, job.result, layout=job.variant)
    job.notes += list(dict.fromkeys(f"{s.code} skipped: {s.why}" for s in result.skipped))
    return {"output": run_hugging(deadweight.load(job.result, dtype=job.dtype), inputs), "control": control}


if __name__ == "__main__":
    serve(work, ("deadweight",))
