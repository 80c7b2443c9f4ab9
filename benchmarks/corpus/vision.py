"""torchvision, timm and vit-pytorch: the smallest model of many families."""

from __future__ import annotations

from typing import Any

from corpus.entry import Entry, Made, called, floats, image, imported

TORCHVISION = """
resnet18 resnet50 resnext50_32x4d efficientnet_b0 swin_t swin_v2_t densenet121 convnext_tiny mobilenet_v2
mobilenet_v3_small regnet_y_400mf maxvit_t shufflenet_v2_x0_5 squeezenet1_1 googlenet vgg11_bn vit_b_16
""".split()  # noqa: SIM905
TIMM = """
vit_tiny_patch16_224 vit_srelpos_small_patch16_224 vit_tiny_r_s16_p8_224 vit_medium_patch16_rope_reg1_gap_256
deit3_small_patch16_224 deit_tiny_distilled_patch16_224 cait_xxs24_224 coatnet_0_rw_224 efficientformer_l1
efficientformerv2_s0 xcit_nano_12_p16_224 convnext_atto convnextv2_atto swin_tiny_patch4_window7_224
swinv2_tiny_window8_256 eva02_tiny_patch14_224 poolformer_s12 caformer_s18 maxvit_rmlp_pico_rw_256
maxvit_nano_rw_256 resnet26 beit_base_patch16_224 levit_128s mixer_s32_224 gmlp_ti16_224 resmlp_12_224 pvt_v2_b0
twins_svt_small crossvit_9_240 pit_ti_224 tnt_s_patch16_224 volo_d1_224 mvitv2_tiny edgenext_xx_small
mobilevit_xxs mobilevitv2_050 fastvit_t8 hiera_tiny_224 davit_tiny focalnet_tiny_srf gcvit_xxtiny nest_tiny
coat_lite_tiny convit_tiny visformer_tiny efficientvit_b0 efficientvit_m0 tiny_vit_5m_224 repvit_m0_9
convmixer_768_32 mambaout_femto sequencer2d_s swiftformer_xs mobilenetv4_conv_small nf_regnet_b0 botnet26t_256
halonet26t lambda_resnet26t
""".split()  # noqa: SIM905
IMAGE = {"image_size": 224, "num_classes": 1000}
PLAIN = IMAGE | {"patch_size": 16, "dim": 256, "depth": 4, "heads": 4, "mlp_dim": 512}
STAGES = {"num_classes": 1000, "dim": 64, "depth": (2, 2, 4, 2), "dim_head": 32}
VIT_PYTORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit:ViT", PLAIN),
    "SimpleViT": ("simple_vit:SimpleViT", PLAIN),
    "SimpleViT with QK norm": ("simple_vit_with_qk_norm:SimpleViT", PLAIN),
    "DeepViT": ("deepvit:DeepViT", PLAIN),
    "CaiT": ("cait:CaiT", PLAIN | {"cls_depth": 2}),
    "CrossViT": ("cross_vit:CrossViT", {"image_size": 240, "num_classes": 1000, "sm_dim": 128, "lg_dim": 192}),
    "PiT": ("pit:PiT", PLAIN | {"depth": (2, 2, 2), "dim": 128}),
    "LeViT": ("levit:LeViT", IMAGE | {"dim": (128, 256, 384), "depth": 2, "heads": (4, 6, 8), "mlp_mult": 2}),
    "MaxViT": ("max_vit:MaxViT", STAGES | {"depth": (1, 1, 2, 1)}),
    "T2TViT": ("t2t:T2TViT", IMAGE | {"dim": 256, "depth": 3, "heads": 4, "mlp_dim": 512}),
    "NesT": (
        "nest:NesT",
        IMAGE | {"patch_size": 4, "dim": 96, "heads": 3, "num_hierarchies": 3, "block_repeats": (2, 2, 4)},
    ),
    "CvT": ("cvt:CvT", {"num_classes": 1000}),
    "CrossFormer": ("crossformer:CrossFormer", {"num_classes": 1000, "depth": (1, 1, 3, 1)}),
    "RvT": ("rvt:RvT", PLAIN),
    "ViT for small datasets": ("vit_for_small_dataset:ViT", PLAIN),
    "MobileViT": (
        "mobile_vit:MobileViT",
        {"image_size": (256, 256), "dims": [64, 80, 96], "num_classes": 1000}
        | {"channels": [16, 16, 24, 24, 48, 48, 64, 64, 80, 80, 320]},
    ),
}
OTHER_SIZES = {"CrossViT": 240, "MobileViT": 256}
SMALL_VIT = {"image_size": 8, "patch_size": 4, "num_classes": 3, "dim": 8, "depth": 1, "heads": 2, "dim_head": 4}


def torchvision_model(name: str) -> Made:
    options = {"init_weights": False} if name == "googlenet" else {}
    return imported(f"torchvision.models:{name}")(weights=None, **options), (image(),)


def torchvision_vit() -> Made:
    """The class behind vit_b_16, small."""
    make = imported("torchvision.models:VisionTransformer")
    return make(image_size=224, patch_size=16, num_layers=6, num_heads=4, hidden_dim=256, mlp_dim=1024), (image(),)


def timm_model(name: str) -> Made:
    module = imported("timm:create_model")(name, pretrained=False)
    return module, (floats(1, *module.default_cfg["input_size"]),)


def vit_pytorch_entry(name: str, place: str, options: dict[str, Any]) -> Entry:
    make = called(f"vit_pytorch.{place}", image(OTHER_SIZES.get(name, 224)), **options)
    return Entry(f"vit-pytorch/{name}", make, "vit_pytorch")


ENTRIES = [
    *(Entry(f"torchvision/{n}", lambda n=n: torchvision_model(n), "torchvision") for n in TORCHVISION),
    Entry("torchvision/VisionTransformer, 6 layers", torchvision_vit, "torchvision"),
    *(Entry(f"timm/{n}", lambda n=n: timm_model(n), "timm") for n in TIMM),
    *(vit_pytorch_entry(name, place, options) for name, (place, options) in VIT_PYTORCH.items()),
    Entry(
        "vit-pytorch/SimpleViT, small",
        called("vit_pytorch.simple_vit:SimpleViT", floats(4, 3, 8, 8), mlp_dim=8, **SMALL_VIT),
        "vit_pytorch",
        complete=True,
    ),
]
