"""torch's own BatchNorm fusion: a convolution and the norm behind it become one convolution, in eval."""

from __future__ import annotations

from collections import OrderedDict

from job import Job, NotSupported, save_state, serve
from nets import small_net
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def fused(net: nn.Sequential) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    last = ""
    for name, layer in net.named_children():
        if isinstance(layer, nn.BatchNorm2d):
            layers[last] = fuse_conv_bn_eval(layers[last], layer)
        else:
            layers[name], last = layer, name
    return nn.Sequential(layers)


def work(job: Job) -> dict[str, Tensor]:
    if job.kind != "conv":
        raise NotSupported("the model has no BatchNorm")
    with job.timed():
        net = small_net().to(job.dtype).eval()
        net.load_state_dict(load_file(job.model / "model.safetensors"))
    inputs = job.read_inputs()
    control = net(inputs)
    with job.timed():
        result = fused(net)
        save_state(result.state_dict(), job.result)
    return {"output": result(inputs), "control": control}


if __name__ == "__main__":
    serve(work, ())
