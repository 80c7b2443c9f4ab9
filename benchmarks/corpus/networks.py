"""Networks of other authors, each from a package of its own: audio, tables, proteins, U-Nets, efficient attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from corpus.entry import Entry, Made, called, floats, image, imported, tokens

SEQUENCE = {"num_tokens": 4000, "dim": 256, "depth": 3, "heads": 4}


def tab_transformer() -> Made:
    make = imported("tab_transformer_pytorch:TabTransformer")
    module = make(categories=(10, 5, 6, 5, 8), num_continuous=10, dim=32, depth=4, heads=8, mlp_act=nn.ReLU())
    return module, (tokens(5, 5, 2), floats(2, 10))


def ft_transformer() -> Made:
    """Yandex's FT-Transformer, in the default shape of its paper."""
    kind = imported("rtdl_revisiting_models:FTTransformer")
    settings = kind.get_default_kwargs() | {"linformer_kv_compression_ratio": None}
    settings.pop("linformer_kv_compression_ratio")
    return kind(n_cont_features=8, cat_cardinalities=[3, 4], d_out=2, **settings), (floats(4, 8), tokens(3, 2, 4))


def table_resnet() -> Made:
    kind = imported("rtdl_revisiting_models:ResNet")
    sizes = {"d_in": 16, "d_out": 2, "n_blocks": 3, "d_block": 192, "d_hidden_multiplier": 2.0}
    return kind(**sizes, d_hidden=None, dropout1=0.1, dropout2=0.0), (floats(4, 16),)


def tab_net() -> Made:
    make = imported("pytorch_tabnet.tab_network:TabNet")
    return make(input_dim=16, output_dim=2, group_attention_matrix=torch.eye(16)), (floats(8, 16),)


def mamba() -> Made:
    config = imported("mambapy.mamba:MambaConfig")(d_model=128, n_layers=3)
    return imported("mambapy.mamba:Mamba")(config), (floats(1, 16, 128),)


def clip() -> Made:
    """OpenCLIP with small towers."""
    vision = {"image_size": 224, "layers": 4, "width": 256, "patch_size": 32, "head_width": 64}
    text = {"context_length": 77, "vocab_size": 4000, "width": 256, "heads": 4, "layers": 4}
    module = imported("open_clip.model:CLIP")(embed_dim=256, vision_cfg=vision, text_cfg=text)
    return module, (image(), tokens(4000, 77))


def perceiver_io() -> Made:
    sizes = {"dim": 32, "queries_dim": 32, "logits_dim": 100, "depth": 2, "num_latents": 64, "latent_dim": 256}
    return imported("perceiver_pytorch:PerceiverIO")(**sizes), {"data": floats(1, 64, 32), "queries": floats(1, 24, 32)}


def diffusion_unet() -> Made:
    sizes = {"sample_size": 32, "block_out_channels": (64, 128), "layers_per_block": 1, "norm_num_groups": 8}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    module = imported("diffusers:UNet2DModel")(**sizes, **blocks)
    return module, {"sample": image(32), "timestep": tokens(1000, 1)[0], "return_dict": False}


def diffusion_transformer() -> Made:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 64, "num_layers": 4, "sample_size": 32, "in_channels": 4}
    module = imported("diffusers:DiTTransformer2DModel")(**sizes, out_channels=8)
    labels = {"timestep": tokens(1000, 1)[0], "class_labels": tokens(1000, 1)[0]}
    return module, {"hidden_states": image(32, 4), **labels, "return_dict": False}


def segmentation(kind: str, encoder: str = "resnet18") -> Made:
    return imported(f"segmentation_models_pytorch:{kind}")(encoder_name=encoder, encoder_weights=None), (image(64),)


def volume_transformer() -> Made:
    sizes = {"img_size": 32, "feature_size": 8, "hidden_size": 192, "mlp_dim": 384, "num_heads": 6}
    return imported("monai.networks.nets:UNETR")(in_channels=1, out_channels=3, **sizes), (floats(1, 1, 32, 32, 32),)


def efficientnet() -> Made:
    return imported("efficientnet_pytorch:EfficientNet").from_name("efficientnet-b0"), (image(),)


def entry(name: str, package: str, make: Callable[[], Made]) -> Entry:
    return Entry(f"others/{name}", make, package)


LM = tokens(4000, 64)
ENTRIES = [
    entry(
        "Performer LM",
        "performer_pytorch",
        called("performer_pytorch:PerformerLM", LM, max_seq_len=64, causal=False, **SEQUENCE),
    ),
    entry("Linformer LM", "linformer", called("linformer:LinformerLM", LM, seq_len=64, k=16, **SEQUENCE)),
    entry(
        "Reformer LM, full attention",
        "reformer_pytorch",
        called("reformer_pytorch:ReformerLM", LM, max_seq_len=64, use_full_attn=True, ff_chunks=1, **SEQUENCE),
    ),
    entry(
        "linear attention LM",
        "linear_attention_transformer",
        called("linear_attention_transformer:LinearAttentionTransformerLM", LM, max_seq_len=64, **SEQUENCE),
    ),
    entry(
        "local attention LM",
        "local_attention",
        called("local_attention:LocalTransformer", LM, max_seq_len=64, local_attn_window_size=16, **SEQUENCE),
    ),
    entry(
        "Nystromformer",
        "nystrom_attention",
        called("nystrom_attention:Nystromformer", floats(1, 64, 256), dim=256, depth=2, heads=4, num_landmarks=16),
    ),
    entry(
        "Perceiver",
        "perceiver_pytorch",
        called(
            "perceiver_pytorch:Perceiver",
            floats(1, 32, 32, 3),
            num_freq_bands=6,
            depth=2,
            max_freq=10.0,
            num_latents=64,
            latent_dim=256,
        ),
    ),
    entry("Perceiver IO", "perceiver_pytorch", perceiver_io),
    entry("Conformer", "conformer", called("conformer:Conformer", floats(1, 64, 256), dim=256, depth=3, heads=4)),
    entry(
        "MLP-Mixer",
        "mlp_mixer_pytorch",
        called(
            "mlp_mixer_pytorch:MLPMixer",
            image(),
            image_size=224,
            channels=3,
            patch_size=16,
            dim=256,
            depth=4,
            num_classes=1000,
        ),
    ),
    entry("gMLP LM", "g_mlp_pytorch", called("g_mlp_pytorch:gMLP", LM, num_tokens=4000, dim=256, depth=4, seq_len=64)),
    entry(
        "axial image transformer",
        "axial_attention",
        called(
            "axial_attention:AxialImageTransformer",
            floats(1, 64, 16, 16),
            dim=64,
            depth=2,
            reversible=False,
            axial_pos_emb_shape=(16, 16),
        ),
    ),
    entry("TabTransformer", "tab_transformer_pytorch", tab_transformer),
    entry("FT-Transformer", "rtdl_revisiting_models", ft_transformer),
    entry("ResNet for tables", "rtdl_revisiting_models", table_resnet),
    entry("TabNet", "pytorch_tabnet", tab_net),
    entry(
        "ESM-2, 8 M",
        "esm",
        called("esm.model.esm2:ESM2", tokens(20, 24) + 4, num_layers=6, embed_dim=320, attention_heads=20),
    ),
    entry("Mamba", "mambapy", mamba),
    entry("minGRU LM", "minGRU_pytorch", called("minGRU_pytorch.minLM:minLM", LM, num_tokens=4000, dim=256, depth=3)),
    entry("OpenCLIP", "open_clip", clip),
    entry("diffusers U-Net", "diffusers", diffusion_unet),
    entry("diffusers DiT", "diffusers", diffusion_transformer),
    entry("x-unet", "x_unet", called("x_unet:XUnet", image(32), dim=32, dim_mults=(1, 2, 4, 8))),
    entry("segmentation U-Net, resnet18", "segmentation_models_pytorch", lambda: segmentation("Unet")),
    entry("segmentation FPN, resnet18", "segmentation_models_pytorch", lambda: segmentation("FPN")),
    entry("EfficientNet-PyTorch b0", "efficientnet_pytorch", efficientnet),
    entry("MONAI UNETR", "monai", volume_transformer),
]
