"""A cut model in its small form: slim layers for what is zero, and a packing for every attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deadweight.compress.streaming import place_rest
from deadweight.compress.truncate import Cut
from deadweight.save.layout import layout
from deadweight.slim.attention import install_attention
from deadweight.slim.format import SlimSpec
from deadweight.slim.layers import install


def assembled(cut: Cut) -> tuple[nn.Module, SlimSpec]:
    """The cut module with small layers in place of the zero-padded ones, and the spec by which to build it again."""
    form = layout(cut.module, cut.facts)
    for path in {path for packing in cut.packings.values() for path in packing["_spare"]} & set(form.layers):
        form.layers[path] = form.layers[path].with_spare_rows()
    dense = dict(cut.module.state_dict())
    stored: dict[str, Tensor] = {}
    for path in form.layers:
        device = cut.module.get_submodule(path).get_parameter("weight").device
        stored |= {name: tensor.to(device) for name, tensor in form.tensors(path, dense.__getitem__).items()}
    attention = {path: {k: v for k, v in p.items() if k[0] != "_"} for path, p in cut.packings.items()}
    for packing in attention.values():
        if packing.get("bias") in form.layers:  # a slim layer knows of its own
            packing["bias"] = None
    spec = SlimSpec(form.spec.layers, attention)
    module = cut.module
    likes = {path: next(module.get_submodule(path).parameters()) for path in cut.packings}
    install(module, spec)
    install_attention(module, attention)
    for path, packing in cut.packings.items():
        tensors = dict(packing["_tensors"])
        if packing["chosen"]:
            tensors["key_places"] = torch.tensor(packing["_key_places"], dtype=torch.int32)
        like = likes[path]
        module.get_submodule(f"{path}.packing").to(like.device, like.dtype)
        stored |= {f"{path}.packing.{name}": tensor.to(like.device) for name, tensor in tensors.items()}
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].data = tensor.to(own[name].dtype if tensor.is_floating_point() else None)
    place_rest(module)
    return module, spec
