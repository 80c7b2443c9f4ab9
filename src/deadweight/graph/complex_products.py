"""Products of complex numbers in real arithmetic: rotary positions are often written so.

(a + ib)·(c + id) = (ac − bd) + i(ad + bc). Where a model looks at pairs of real numbers as complex ones, multiplies
them and looks at the result as pairs again, the product is spelled out: every rule then meets sums and products.
"""

from __future__ import annotations

import torch

from deadweight.graph.node import Node, Ref
from deadweight.graph.rewriting import Canonicaliser, rewrites

aten = torch.ops.aten


@rewrites("aten.view_as_real")
def spell_out(make: Canonicaliser, node: Node) -> Ref | None:
    """view_as_real(view_as_complex(x)·c), with x pairs of real numbers and c any complex number."""
    product = make.nodes[node.args[0].name]
    if product.op == "aten.view_as_complex":
        return product.args[0]
    refs = [a for a in product.args if isinstance(a, Ref)]
    if product.op != "aten.mul" or product.kwargs or len(refs) != 2:
        return None
    first, second = (make.nodes[ref.name] for ref in refs)
    if "aten.view_as_complex" not in (first.op, second.op) or None in (first.dtype, second.dtype):
        return None
    if not (first.dtype.is_complex and second.dtype.is_complex):  # type: ignore[union-attr]
        return None
    (a, b), (c, d) = parts(make, node, first, "left"), parts(make, node, second, "right")
    shape = node.shape[:-1]

    def join(name: str, op: str, x: Ref, y: Ref) -> Ref:
        return make.emit(f"{node.name}_{name}", f"aten.{op}", getattr(aten, op).Tensor, (x, y), shape, node)

    real = join("real", "sub", join("ac", "mul", a, c), join("bd", "mul", b, d))
    imaginary = join("imaginary", "add", join("ad", "mul", a, d), join("bc", "mul", b, c))
    return make.emit(f"{node.name}_pairs", "aten.stack", aten.stack.default, ([real, imaginary], -1), node.shape, node)


def parts(make: Canonicaliser, node: Node, value: Node, side: str) -> list[Ref]:
    """The real and the imaginary part of a complex value."""
    shape = (*value.shape, 2)
    if value.op == "aten.view_as_complex":
        pairs = value.args[0]
    else:
        name = f"{node.name}_{side}"
        pairs = make.emit(name, "aten.view_as_real", aten.view_as_real.default, (Ref(value.name),), shape, node)
    names = (f"{node.name}_{side}_real", f"{node.name}_{side}_imaginary")
    return [
        make.emit(name, "aten.select", aten.select.int, (pairs, len(shape) - 1, k), value.shape, node)
        for k, name in enumerate(names)
    ]
