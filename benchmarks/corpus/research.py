"""Vision, diffusion, speech, 3-D and flows as their authors published them: repositories and packages, small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from corpus.entry import Entry, Made, called, floats, image, imported, tokens

LATENT, TIMES, CLASSES = 16, (3.0, 500.0), 100
UNET = {"image_size": 16, "model_channels": 32, "num_res_blocks": 1, "attention_resolutions": (2,)}
UNET |= {"channel_mult": (1, 2), "num_heads": 2}
WINDOWS = {"img_size": 56, "patch_size": 2, "embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6], "window_size": 7}


def denoiser(place: str) -> Made:
    """A diffusion transformer of latents, times and classes."""
    sizes = {"input_size": LATENT, "patch_size": 2, "hidden_size": 192, "depth": 4, "num_heads": 3}
    module = imported(place)(in_channels=4, num_classes=CLASSES, **sizes)
    return module, (floats(2, 4, LATENT, LATENT), torch.tensor(TIMES), tokens(CLASSES, 2)[0])


def guided_unet(**options: Any) -> Made:
    module = imported("guided_diffusion.unet:UNetModel")(
        in_channels=3, out_channels=6, num_classes=10, **UNET, **options
    )
    return module, (floats(2, 3, 16, 16), torch.tensor(TIMES), tokens(10, 2)[0])


def text_unet() -> Made:
    """The U-Net of Stable Diffusion: it reads a text by cross-attention."""
    spatial = {"use_spatial_transformer": True, "transformer_depth": 1, "context_dim": 64, "use_checkpoint": False}
    kind = imported("ldm.modules.diffusionmodules.openaimodel:UNetModel")
    module = kind(in_channels=4, out_channels=4, **UNET, **spatial)
    return module, {"x": floats(2, 4, 16, 16), "timesteps": torch.tensor(TIMES), "context": floats(2, 7, 64)}


def autoencoder() -> Made:
    """VQGAN's encoder and decoder, without the codes between them."""
    sizes = {"ch": 32, "out_ch": 3, "ch_mult": (1, 2, 2), "num_res_blocks": 1, "attn_resolutions": [8]}
    sizes |= {"in_channels": 3, "resolution": 32, "z_channels": 16}
    encoder, decoder = (imported(f"taming.modules.diffusionmodules.model:{n}") for n in ("Encoder", "Decoder"))
    return nn.Sequential(encoder(double_z=False, **sizes), nn.Conv2d(16, 16, 1), decoder(**sizes)), (image(32),)


def vocoder() -> Made:
    class Settings(dict):
        __getattr__ = dict.__getitem__

    blocks = {"resblock": "2", "resblock_kernel_sizes": [3, 5, 7], "resblock_dilation_sizes": [[1, 2], [2, 6], [3, 12]]}
    ups = {"upsample_rates": [8, 8, 4], "upsample_kernel_sizes": [16, 16, 8], "upsample_initial_channel": 128}
    return imported("models:Generator")(Settings(blocks | ups)), (floats(1, 80, 8),)


class Detector(nn.Module):
    """DETR behind its backbone: object queries, classes and boxes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 128, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 256}
        self.transformer = imported("models.transformer:Transformer")(**sizes)
        self.queries, self.classes, self.boxes = nn.Embedding(20, 128), nn.Linear(128, 21), nn.Linear(128, 4)

    def forward(self, features: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        read = self.transformer(features, mask, self.queries.weight, positions)[0]
        return self.classes(read), self.boxes(read).sigmoid()


def detector() -> Made:
    return Detector(), (floats(2, 128, 6, 6), torch.zeros(2, 6, 6, dtype=torch.bool), floats(2, 128, 6, 6))


def self_supervised() -> Made:
    sizes = {"img_size": 98, "patch_size": 14, "embed_dim": 192, "depth": 4, "num_heads": 3}
    kind = imported("dinov2.models.vision_transformer:DinoVisionTransformer")
    return kind(**sizes, init_values=1.0, block_chunks=0, num_register_tokens=4), (image(98),)


def image_encoder() -> Made:
    """The encoder of Segment Anything: windows, relative positions, and a neck of channel norms."""
    sizes = {"img_size": 128, "embed_dim": 128, "depth": 3, "num_heads": 4, "out_chans": 64, "window_size": 4}
    kind = imported("segment_anything.modeling:ImageEncoderViT")
    return kind(**sizes, use_rel_pos=True, global_attn_indexes=(2,)), (image(128),)


def coupling_flow() -> Made:
    """RealNVP: the flow's value and the logarithm of its volume."""
    flows = imported("normflows:flows")
    layers = []
    for _ in range(4):
        network = imported("normflows.nets:MLP")([2, 64, 64, 4])
        layers += [flows.AffineCouplingBlock(network), flows.Permute(4, mode="swap")]

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            volume = z.new_zeros(len(z))
            for layer in self.layers:
                z, more = layer(z)
                volume = volume + more
            return z, volume

    return Flow(), (floats(16, 4),)


def windowed() -> Made:
    return imported("models.swin_transformer:SwinTransformer")(num_classes=CLASSES, **WINDOWS), (image(56),)


def radiance() -> Made:
    sizes = {"D": 8, "W": 256, "input_ch": 63, "input_ch_views": 27, "skips": [4], "use_viewdirs": True}
    return imported("run_nerf_helpers:NeRF")(**sizes), (floats(16, 90),)


CHECKOUTS: list[tuple[str, str, Any]] = [
    ("DiT", "DiT", lambda: denoiser("models:DiT")),
    ("SiT", "SiT", lambda: denoiser("models:SiT")),
    (
        "guided-diffusion",
        "guided-diffusion U-Net",
        lambda: guided_unet(use_scale_shift_norm=True, resblock_updown=True),
    ),
    ("guided-diffusion", "guided-diffusion U-Net, added times", lambda: guided_unet(use_new_attention_order=True)),
    ("latent-diffusion", "latent-diffusion U-Net with text", text_unet),
    ("taming-transformers", "VQGAN encoder and decoder", autoencoder),
    ("dinov2", "DINOv2", self_supervised),
    ("detr", "DETR transformer", detector),
    ("Swin-Transformer", "Swin, original", windowed),
    (
        "ConvNeXt",
        "ConvNeXt, original",
        called(
            "models.convnext:ConvNeXt", image(128), num_classes=CLASSES, depths=[2, 2, 4, 2], dims=[40, 80, 160, 320]
        ),
    ),
    (
        "RepVGG",
        "RepVGG",
        called(
            "repvgg:RepVGG",
            image(64),
            num_blocks=[2, 2, 2, 1],
            num_classes=CLASSES,
            width_multiplier=[0.5, 0.5, 0.5, 1],
        ),
    ),
    ("hifi-gan", "HiFi-GAN generator", vocoder),
    (
        "Pointnet_Pointnet2_pytorch/models",
        "PointNet",
        called("pointnet_cls:get_model", floats(4, 3, 64), k=10, normal_channel=False),
    ),
    ("nerf-pytorch", "NeRF", radiance),
]
PACKAGES: list[tuple[str, str, Any]] = [
    ("segment_anything", "Segment Anything encoder", image_encoder),
    (
        "siren_pytorch",
        "SIREN",
        called("siren_pytorch:SirenNet", floats(64, 2), dim_in=2, dim_hidden=256, dim_out=3, num_layers=5),
    ),
    ("normflows", "RealNVP", coupling_flow),
    (
        "demucs",
        "Demucs",
        called("demucs.demucs:Demucs", floats(1, 2, 16000), sources=["a", "b"], channels=16, depth=4, lstm_layers=1),
    ),
]
ENTRIES = [
    *(Entry(f"research/{name}", make, checkout=folder) for folder, name, make in CHECKOUTS),
    *(Entry(f"research/{name}", make, package) for package, name, make in PACKAGES),
]
