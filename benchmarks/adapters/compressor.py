"""llmcompressor: norm fusion on its own, and its SpinQuant modifier, which fuses norms and then rotates the stream."""

from __future__ import annotations

import torch
from compressed_tensors import match_modules_set
from job import Job, NotSupported, first_line, load_hugging, run_hugging, serve
from llmcompressor import oneshot
from llmcompressor.modeling import fuse_norm_linears
from llmcompressor.modifiers.transform import SpinQuantModifier
from llmcompressor.modifiers.transform.spinquant.norm_mappings import NormMapping, infer_norm_mapping_from_model
from llmcompressor.utils import untie_word_embeddings
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# Which linear layers read which norm, in the words llmcompressor has for it; for LLaMA-like names it knows this.
GIVEN = {
    "opt": {
        r"re:.*layers\.\d+\.self_attn_layer_norm$": ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"],
        r"re:.*layers\.\d+\.final_layer_norm$": ["re:.*fc1$"],
        r"re:.*decoder\.final_layer_norm$": ["lm_head"],
    },
    "gpt_neox": {
        r"re:.*input_layernorm$": ["re:.*query_key_value$"],
        r"re:.*post_attention_layernorm$": ["re:.*dense_h_to_4h$"],
        r"re:.*final_layer_norm$": ["re:.*(embed_out|lm_head)$"],
    },
}


def fuse_norms(job: Job, module: nn.Module) -> None:
    untie_word_embeddings(module)
    if module.config.model_type == "gpt2":
        raise NotSupported("it takes nn.Linear, and GPT-2's layers are of another class")
    given = GIVEN.get(module.config.model_type)
    if given is None:
        mappings = infer_norm_mapping_from_model(module)
    else:
        mappings = [NormMapping(norm=norm, linears=linears) for norm, linears in given.items()]
        job.notes.append("it knows no norms by these names: which layers read which norm was given to it")
    fused = 0
    for mapping in mappings:
        for norm, *linears in match_modules_set(module, (mapping.norm, *mapping.linears)):
            fuse_norm_linears(norm[0], tree_leaves(linears))
            fused += 1
    if not fused:
        raise NotSupported("its norm mappings match no layer")


def spin(job: Job, module: nn.Module) -> None:
    if job.variant == "spinquant, not centred":
        SpinQuantModifier._center_embeddings = lambda self, model: None
        job.notes.append("its step that centres the embeddings was taken out by us, to see what that step does")
    try:
        oneshot(model=module, recipe=SpinQuantModifier(rotations=["R1", "R2"]), pipeline="datafree")
    except ValueError as error:
        if "incomplete set" not in str(error):
            raise
        raise NotSupported(f"the names it looks for are not there: {first_line(error)}") from error


def work(job: Job) -> dict[str, Tensor]:
    if job.kind == "conv":
        raise NotSupported("no transformer")
    inputs = job.read_inputs()
    with job.timed():
        module = load_hugging(job, job.model)
    control = run_hugging(module, inputs)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with job.timed():
        (fuse_norms if job.variant == "fuse" else spin)(job, module)
    if all(torch.equal(tensor, before.get(name, tensor)) for name, tensor in module.state_dict().items()):
        raise NotSupported("it finished, and had changed no tensor")
    with job.timed():
        module.save_pretrained(job.result)
    return {"output": run_hugging(module, inputs), "control": control}


if __name__ == "__main__":
    serve(work, ("llmcompressor", "compressed-tensors"))
