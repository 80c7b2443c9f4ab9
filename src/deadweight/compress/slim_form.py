"""From a truncated model, which is padded with zeros, to slim layers and packed heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deadweight.compress.streaming import place_rest
from deadweight.compress.truncate import TruncatedModel
from deadweight.save.slim_layout import Slim, SlimLayer, layout
from deadweight.slim.format import BiasSpec, SlimSpec
from deadweight.slim.heads import install_heads
from deadweight.slim.layers import install


def assemble_slim(truncated: TruncatedModel) -> tuple[nn.Module, SlimSpec]:
    """The module with small layers in place of the zero-padded ones, and the spec from which it can be rebuilt."""
    module, heads = truncated.module, truncated.heads
    form = layout(module, truncated.facts)
    for path in (h.new_bias for h in heads.values()):
        if path is not None and path not in form.layers:  # a slim layer has a bias of its own
            form.layers[path] = SlimLayer(BiasSpec(module.get_submodule(path).get_parameter("bias").numel()))
    stored = layer_tensors(module, form)
    likes = {path: next(module.get_submodule(path).parameters()) for path in heads}
    spec = SlimSpec(form.spec.layers, {path: h.spec for path, h in heads.items()})
    install(module, spec)
    install_heads(module, spec.heads)
    for path, like in likes.items():
        if heads[path].spec.listed:
            stored[f"{path}.packing.key_dimensions"] = heads[path].key_dimensions.to(like.device)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].data = tensor.to(own[name].dtype if tensor.is_floating_point() else None)
    place_rest(module)
    return module, spec


def layer_tensors(module: nn.Module, form: Slim) -> dict[str, Tensor]:
    """The tensors of the small layers, each on the device of the layer that it replaces."""
    dense = dict(module.state_dict())
    stored: dict[str, Tensor] = {}
    for path in form.layers:
        device = module.get_submodule(path).get_parameter("weight").device
        stored |= {name: tensor.to(device) for name, tensor in form.tensors(path, dense.__getitem__).items()}
    return stored
