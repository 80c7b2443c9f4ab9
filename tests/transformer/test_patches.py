"""Images as patches: the cut is exact, every weight is used, and a small model learns to tell shapes apart."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import deadweight
from deadweight.transformer import TransformerConfig
from deadweight.transformer.patches import PatchClassifier, patches

SIZES = {"d_model": 16, "n_layers": 1, "heads": 2, "context": 4, "vocab_size": 1, "causal": False}


def test_patches_are_cut_row_by_row_and_hold_all_channels() -> None:
    images = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    cut = patches(images, 2)
    assert cut.shape == (2, 6, 12)
    assert torch.equal(cut[1, 4], images[1, :, 2:4, 2:4].flatten())
    with pytest.raises(ValueError, match=r"found images of 4 × 6 pixels; expected multiples of the patch size 4"):
        patches(images, 4)


def test_a_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an encoder"):
        PatchClassifier(TransformerConfig(**{**SIZES, "causal": True}), patch=2, channels=1, classes=2)


def test_every_weight_has_a_gradient_and_the_model_learns_where_a_spot_is() -> None:
    torch.manual_seed(0)
    model = PatchClassifier(TransformerConfig(**SIZES), patch=2, channels=1, classes=4)
    places = torch.randint(4, (64,))
    images = torch.zeros(64, 4, 1, 4).scatter_(1, places.view(-1, 1, 1, 1).expand(-1, 1, 1, 4), 1.0).view(64, 1, 4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(images), places)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    assert bool((model(images).argmax(1) == places).all())


def test_the_audit_finds_the_key_bias_of_an_image_model() -> None:
    config = TransformerConfig(**{**SIZES, "biases": ["query", "key", "value", "output"], "norm_place": "post"})
    result = deadweight.audit(PatchClassifier(config, patch=2, channels=1, classes=3), (torch.randn(2, 1, 4, 4),))
    dead = [f.parameter for f in result.findings if f.code == "DW002"]
    assert dead == ["transformer.layers.0.attention.key.bias"]
