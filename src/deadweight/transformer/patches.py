"""The transformer on images: patches as tokens, and one logit per class, as in a vision transformer."""

from __future__ import annotations

from torch import Tensor, nn

from .configuration import TransformerConfig
from .modeling import TransformerModel


def patches(images: Tensor, size: int) -> Tensor:
    """(b, channels, height, width) → (b, patches, channels · size²), row by row."""
    b, channels, height, width = images.shape
    if height % size or width % size:
        raise ValueError(f"found images of {height} × {width} pixels; expected multiples of the patch size {size}")
    cut = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # b c rows y columns x
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, channels * size * size)


class PatchClassifier(nn.Module):
    """Patches, an encoder, the mean of its hidden states, and a readout. It needs no table of tokens."""

    def __init__(self, config: TransformerConfig, *, patch: int, channels: int, classes: int) -> None:
        if config.causal:
            raise ValueError("found causal = True; expected an encoder, in which every patch sees every other")
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, config.d_model)
        self.transformer = TransformerModel(config)
        self.transformer.tokens = nn.Identity()  # type: ignore[assignment]
        self.readout = nn.Linear(config.d_model, classes)
        for layer in (self.embed, self.readout):
            self.transformer.initialise(layer)

    def forward(self, images: Tensor) -> Tensor:
        embedded = self.embed(patches(images, self.patch))
        return self.readout(self.transformer(inputs_embeds=embedded, use_cache=False).last_hidden_state.mean(1))
