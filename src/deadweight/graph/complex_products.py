"""Products of complex numbers in real arithmetic: rotary position embeddings are often written this way.

(a + ib)·(c + id) = (ac − bd) + i(ad + bc). Where a model views pairs of real numbers as complex ones, multiplies them
and views the result as pairs again, the product is spelled out, so that the rules only see real sums and products.
"""

from __future__ import annotations

from deadweight.graph.node import Node, Operation, Ref
from deadweight.graph.operations import ADD, MUL, SELECT, STACK, SUB, VIEW_AS_REAL
from deadweight.graph.rewriting import Canonicaliser, rewrites


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

    def combine(name: str, operation: Operation, x: Ref, y: Ref) -> Ref:
        return make.emit(f"{node.name}_{name}", operation, (x, y), shape, node)

    real = combine("real", SUB, combine("ac", MUL, a, c), combine("bd", MUL, b, d))
    imaginary = combine("imaginary", ADD, combine("ad", MUL, a, d), combine("bc", MUL, b, c))
    return make.emit(f"{node.name}_pairs", STACK, ([real, imaginary], -1), node.shape, node)


def parts(make: Canonicaliser, node: Node, value: Node, side: str) -> list[Ref]:
    """The real and the imaginary part of a complex value."""
    shape = (*value.shape, 2)
    if value.op == "aten.view_as_complex":
        pairs = value.args[0]
    else:
        name = f"{node.name}_{side}"
        pairs = make.emit(name, VIEW_AS_REAL, (Ref(value.name),), shape, node)
    names = (f"{node.name}_{side}_real", f"{node.name}_{side}_imaginary")
    return [make.emit(name, SELECT, (pairs, len(shape) - 1, k), value.shape, node) for k, name in enumerate(names)]
