"""Exact changes of the weights that training may make along the way: the function stays the same.

*Balance*: in every head, queries and keys get bases in which both have the same Gram matrix, and so do values and the
output map. *Dead directions*: what the model cannot see is set to zero: the mean that every map to the stream adds,
which each LayerNorm removes, and the direction of a reader's weights that a LayerNorm leaves empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from deadweight.transformer import TransformerForCausalLM
from deadweight.transformer.modeling import Attention, Layer

SMALLEST = 1e-10  # of the largest eigenvalue: a Gram matrix that is nearly singular is treated as if it had this


def power(matrices: Tensor, exponent: float) -> Tensor:
    """A real power of symmetric positive matrices."""
    values, vectors = torch.linalg.eigh(matrices)
    values = values.clamp_min(SMALLEST * values.amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny))
    return (vectors * values.pow(exponent).unsqueeze(-2)) @ vectors.mT


def balancing(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A and A⁻¹, symmetric, with A·first·A = A⁻¹·second·A⁻¹: A² is the geometric mean of first⁻¹ and second."""
    root, inverse = power(first, 0.5), power(first, -0.5)
    square = inverse @ power(root @ second @ root, 0.5) @ inverse
    return power(square, 0.5), power(square, -0.5)


@torch.no_grad()
def balance(model: TransformerForCausalLM) -> None:
    """Equal Gram matrices for queries and keys, and for values and output, in every head."""
    for attention in (m for m in model.modules() if isinstance(m, Attention)):
        if balances_scores(attention):
            balance_pair(attention.query, attention.key, attention.shape.heads)
        if balances_values(attention):
            balance_pair(attention.value, attention.output, attention.shape.heads, columns=True)


def balances_scores(attention: Attention) -> bool:
    """Whether any change of basis of queries and keys is free: full weights, nothing but a product behind them."""
    shape, config = attention.shape, attention.config
    plain = config.positions != "rotary" and not (config.query_norm or config.key_norm)
    return plain and shape.heads == shape.key_heads and (shape.query, shape.key) == ("full", "full")


def balances_values(attention: Attention) -> bool:
    return attention.shape.value == "full" and attention.shape.heads == attention.shape.key_heads


def balance_pair(one: nn.Module, other: nn.Module, heads: int, *, columns: bool = False) -> None:
    """Change the basis of each head between two maps; the second is read by its columns, or else by its rows."""
    assert isinstance(one, nn.Linear) and isinstance(other, nn.Linear)
    rows = one.weight.double().unflatten(0, (heads, -1))  # h q d
    second = (other.weight.mT if columns else other.weight).double().unflatten(0, (heads, -1))
    a, inverse = balancing(rows @ rows.mT, second @ second.mT)
    one.weight.copy_((a @ rows).flatten(0, 1))
    if one.bias is not None:
        one.bias.copy_((a @ one.bias.double().view(heads, -1, 1)).flatten())
    turned = (inverse @ second).flatten(0, 1)
    other.weight.copy_(turned.mT if columns else turned)
    if other.bias is not None and not columns:
        other.bias.copy_((inverse @ other.bias.double().view(heads, -1, 1)).flatten())


@torch.no_grad()
def remove_dead_directions(model: TransformerForCausalLM) -> None:
    """Set to zero what every LayerNorm of a pre-norm model hides."""
    config = model.config
    if config.norm != "layer" or config.norm_place != "pre" or not (config.attention_skip and config.mlp_skip):
        return
    for layer in (m for m in model.modules() if isinstance(m, Layer)):
        for writer in (layer.attention.output, layer.mlp.down):
            writer.weight.sub_(writer.weight.mean(0, keepdim=True))
            if writer.bias is not None:
                writer.bias.sub_(writer.bias.mean())
        for norm, reader in readers(layer):
            hide(norm, reader)
    if model.transformer.places is not None and not config.embedding_norm:
        places = model.transformer.places.weight
        places.sub_(places.mean(1, keepdim=True))


def readers(layer: Layer) -> Iterator[tuple[nn.Module, nn.Linear]]:
    """Every linear map that reads a norm, with that norm."""
    attention = layer.attention
    for norm, maps in (
        (layer.attention_norm, (attention.query, attention.key, attention.value)),
        (layer.mlp_norm, (layer.mlp.up, layer.mlp.gate)),
    ):
        yield from ((norm, m) for m in maps if isinstance(m, nn.Linear))


def hide(norm: nn.Module, reader: nn.Linear) -> None:
    """Project the rows off 1/gain: the norm's output has no component there. Not if the norm adds a shift."""
    assert isinstance(norm, nn.LayerNorm)
    own = dict(norm.named_parameters())
    if "bias" in own:
        return
    unseen = 1 / signed_floor(own["weight"]) if "weight" in own else torch.ones_like(reader.weight[0])
    unseen = unseen / unseen.norm()
    reader.weight.sub_(torch.outer(reader.weight @ unseen, unseen))


def signed_floor(x: Tensor) -> Tensor:
    """x, with zeros replaced by the smallest normal number: then 1/x points at them alone."""
    return torch.where(x == 0, torch.finfo(x.dtype).tiny ** 0.5, x)


def both(model: TransformerForCausalLM) -> None:
    remove_dead_directions(model)
    balance(model)


UPKEEPS: dict[str, Callable[[TransformerForCausalLM], None]] = {
    "balance": balance,
    "dead directions": remove_dead_directions,
    "both": both,
}
