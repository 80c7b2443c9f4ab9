"""A small picture for each law: where the change enters, what it passes, and where it ends. Drawn as SVG.

    python scripts/law_pictures.py DW002 > key-bias.svg

A picture is a row of boxes with arrows between them. Colours are readable on light and on dark paper; text has the
colour of the page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from typing import Literal

Kind = Literal["redundant", "changed", "same", "plain"]
COLOUR = {"redundant": "#e03131", "changed": "#e8890c", "same": "#2b9a4b", "plain": "#868e96"}
MEANING = {"redundant": "redundant", "changed": "changes", "same": "stays the same"}
WIDTH, BOX_TOP, BOX_HEIGHT, GAP, LINE = 760, 12, 62, 46, 17


@dataclass(frozen=True)
class Box:
    """A value or an operation: its text, one or two lines; what happens there; a note below it."""

    text: str
    kind: Kind = "plain"
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """Boxes from left to right, and an arrow for each gap between them."""

    title: str
    boxes: tuple[Box, ...]
    arrows: str  # one of → ← + × | (nothing) for each gap


PICTURES = {
    "DW001": Picture(
        "A parameter without a path to the output",
        (
            Box("old_proj", "redundant", "no arrow\nleaves it"),
            Box("x", "plain"),
            Box("proj", "plain"),
            Box("output", "same", "never sees\nold_proj"),
        ),
        "|→→",
    ),
    "DW002": Picture(
        "The softmax over the keys cancels a bias of the keys",
        (
            Box("key bias b", "redundant", "the same\nfor all keys"),
            Box("keys\nkⱼ + b", "changed"),
            Box("scores\nqᵢ·kⱼ + qᵢ·b", "changed", "qᵢ·b is one number\nfor the whole row"),
            Box("softmax\nover j", "same", "ignores a constant\nof its row"),
            Box("weights pᵢⱼ", "same"),
        ),
        "→→→→",
    ),
    "DW003": Picture(
        "Attention weights sum to one, so a bias of the values leaves as a constant",
        (
            Box("value bias b_V", "redundant"),
            Box("values\nvⱼ + b_V", "changed"),
            Box("average\nΣ pᵢⱼ (vⱼ + b_V)", "changed", "Σ pᵢⱼ = 1:\nb_V comes out whole"),
            Box("W_O", "changed", "adds W_O b_V,\na constant"),
            Box("output bias\nb_O", "same", "takes W_O b_V\nover"),
        ),
        "→→→→",
    ),
    "DW004": Picture(
        "BatchNorm subtracts the mean that a bias has moved",
        (
            Box("conv bias b", "redundant"),
            Box("channel\nx + b", "changed", "its mean moves\nby b, too"),
            Box("x + b − mean", "same", "b − b = 0"),
            Box("divide by std", "same"),
            Box("output", "same"),
        ),
        "→→→→",
    ),
    "DW005": Picture(
        "LayerNorm removes what is added to all channels",
        (
            Box("mean of the\nbias or row", "redundant", "c in every\nchannel"),
            Box("stream\nx + c·1", "changed", "skips carry\nit along"),
            Box("LayerNorm", "same", "subtracts\nthe mean"),
            Box("x̂", "same"),
        ),
        "→→→",
    ),
    "DW006": Picture(
        "Every linear reader absorbs gain and shift of the norm",
        (
            Box("x̂", "plain"),
            Box("gain γ,\nshift β", "redundant", "become\n1 and 0"),
            Box("W diag γ", "changed", "takes γ over"),
            Box("b + W β", "changed", "takes β over"),
            Box("output", "same"),
        ),
        "→→→→",
    ),
    "DW007": Picture(
        "In a post-norm block the shift of the norm moves into the biases behind it",
        (
            Box("norm's shift\nβ + c", "redundant"),
            Box("sublayer\nb_1 − W_1 c", "changed", "sees what it\nsaw before"),
            Box("skip\nx + c", "changed"),
            Box("b_2 − c", "changed", "takes c\naway again"),
            Box("next norm", "same"),
        ),
        "→++→",
    ),
    "DW008": Picture(
        "What LayerNorm returns sums to zero, so one direction of each row adds a constant only",
        (
            Box("LayerNorm", "plain", "Σ x̂ᵢ = 0"),
            Box("W + u·(1/γ)ᵀ", "redundant", "one direction\nof each row"),
            Box("adds\nu·Σ β/γ", "changed", "the same number\nfor all inputs"),
            Box("bias\nb − u·Σ β/γ", "changed", "takes it away"),
            Box("output", "same"),
        ),
        "→→→→",
    ),
    "DW009": Picture(
        "Only the dot products of queries and keys matter",
        (
            Box("W_Q", "plain"),
            Box("A·q", "changed", "any invertible A"),
            Box("q·k", "same", "(A q)·(A⁻ᵀ k) = q·k"),
            Box("A⁻ᵀ·k", "changed"),
            Box("W_K", "plain"),
        ),
        "→→←←",
    ),
    "DW010": Picture(
        "Only the product of value and output projection matters",
        (
            Box("A·W_V", "changed", "any invertible A"),
            Box("average\nover the keys", "changed", "A passes\nthrough the sum"),
            Box("W_O·A⁻¹", "changed", "A⁻¹ A = 1"),
            Box("output", "same"),
        ),
        "→→→",
    ),
    "DW011": Picture(
        "A hidden unit may be scaled up if its readers are scaled down",
        (
            Box("s·w\ninto the unit", "changed", "s > 0"),
            Box("ReLU or gate", "changed", "σ(s z) = s σ(z)"),
            Box("w'/s\nout of the unit", "changed"),
            Box("output", "same", "s/s = 1"),
        ),
        "→→→",
    ),
    "DW012": Picture(
        "The whole residual stream may be rotated",
        (
            Box("writers\nQ·W", "changed", "embeddings,\nW_O, W_2"),
            Box("stream\nQ·x", "changed", "skips add in\none basis"),
            Box("RMSNorm", "changed", "‖Qx‖ = ‖x‖"),
            Box("readers\nW·Qᵀ", "changed", "Qᵀ Q = 1"),
            Box("output", "same"),
        ),
        "→→→→",
    ),
    "DW013": Picture(
        "A vector can move between tables that are added",
        (
            Box("token table\nT[t] + c", "changed"),
            Box("position table\nP[i] − c", "redundant"),
            Box("sum", "same", "c − c = 0"),
            Box("first block", "same"),
        ),
        "+→→",
    ),
    "DW014": Picture(
        "A norm ignores the length of what it reads",
        (
            Box("all writers\ns·W, s·b", "changed", "one factor\nfor all"),
            Box("stream\ns·x", "changed"),
            Box("norm", "same", "s·x / ‖s·x‖ = x / ‖x‖\nbut for ε"),
            Box("readers", "same"),
        ),
        "→→→",
    ),
    "DW015": Picture(
        "In the basis W_Q the queries are the stream itself",
        (
            Box("embedding\nΘ·E", "changed", "Θ = W_Q"),
            Box("stream\nΘ·x", "changed", "no norm, and\nthe right skips"),
            Box("W_Q Θ⁻¹ = 1", "redundant", "queries are\nthe stream"),
            Box("W_K Θ⁻¹,\nW_V Θ⁻¹", "changed"),
            Box("output", "same"),
        ),
        "→→|→",
    ),
    "DW016": Picture(
        "Probabilities ignore a shift of all logits",
        (
            Box("mean over\nthe words", "redundant", "of bias and\nunembedding"),
            Box("logits\nz + t·1", "changed", "t may depend\non the input"),
            Box("softmax\nover words", "same"),
            Box("probabilities", "same"),
        ),
        "→→→",
    ),
    "DW017": Picture(
        "Of two biases in one sum only their sum matters",
        (
            Box("attention\n… + b_O", "changed", "b_O + c"),
            Box("feed-forward\n… + b_2", "redundant", "b_2 − c"),
            Box("sum", "same", "b_O + b_2"),
            Box("next block", "same"),
        ),
        "+→→",
    ),
    "DW018": Picture(
        "A softmax over experts ignores what all experts share",
        (
            Box("mean of the\nrouter's rows", "redundant"),
            Box("scores\ns + t·1", "changed", "the same t\nfor all experts"),
            Box("softmax\nover experts", "same", "top-k keeps\nits order, too"),
            Box("mixture", "same"),
        ),
        "→→→",
    ),
    "DW019": Picture(
        "Between two linear maps any basis gives the same function",
        (
            Box("x", "plain"),
            Box("G·A", "changed", "any invertible G"),
            Box("hidden\nG·h", "changed", "nothing non-linear\nin between"),
            Box("B·G⁻¹", "changed"),
            Box("y = B A x", "same"),
        ),
        "→→→→",
    ),
    "DW020": Picture(
        "A full weight does the work of the map beside it",
        (
            Box("v", "plain", "both read\nthe same value"),
            Box("M·v", "redundant", "a small map:\nM + C"),
            Box("W·v", "changed", "the full weight:\nW − C"),
            Box("sum\n(W + M)·v", "same"),
        ),
        "→+→",
    ),
}


def draw_law(code: str) -> str:
    """The picture of a law as SVG; empty where there is none."""
    return draw(PICTURES[code]) if code in PICTURES else ""


def draw(picture: Picture) -> str:
    n = len(picture.boxes)
    assert len(picture.arrows) == n - 1, picture.title
    width = (WIDTH - 4 - GAP * (n - 1)) / n
    lefts = [2 + i * (width + GAP) for i in range(n)]
    shapes = [shape for left, box in zip(lefts, picture.boxes, strict=True) for shape in draw_box(box, left, width)]
    for left, arrow in zip(lefts, picture.arrows, strict=False):
        shapes += draw_arrow(arrow, left + width)
    lines = max(box.note.count("\n") + 1 if box.note else 0 for box in picture.boxes)
    below = BOX_TOP + BOX_HEIGHT + LINE * lines + 26
    shapes += draw_legend([kind for kind in MEANING if any(b.kind == kind for b in picture.boxes)], below)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {below + 8}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="currentColor">'
        f"<title>{escape(picture.title)}</title>{''.join(shapes)}</svg>"
    )


def draw_box(box: Box, left: float, width: float) -> list[str]:
    colour = COLOUR[box.kind]
    dashes = ' stroke-dasharray="5 4"' if box.kind == "redundant" else ""
    middle = left + width / 2
    lines, notes = box.text.split("\n"), box.note.split("\n") if box.note else []
    first = BOX_TOP + BOX_HEIGHT / 2 + 5 - LINE / 2 * (len(lines) - 1)
    under = BOX_TOP + BOX_HEIGHT + LINE
    return [
        f'<rect x="{left:.1f}" y="{BOX_TOP}" width="{width:.1f}" height="{BOX_HEIGHT}" rx="6" stroke="{colour}" '
        f'stroke-width="2" fill="{colour}" fill-opacity="0.1"{dashes}/>',
        *(text(line, middle, first + LINE * i) for i, line in enumerate(lines)),
        *(text(line, middle, under + 15 * i, size=12) for i, line in enumerate(notes)),
    ]


def draw_arrow(arrow: str, left: float) -> list[str]:
    """What stands in the gap right of `left`."""
    y, right = BOX_TOP + BOX_HEIGHT / 2, left + GAP
    if arrow == "|":
        return []
    if arrow in "+×":
        return [text(arrow, left + GAP / 2, y + 6, size=18)]
    start, end, step = (left + 6, right - 6, -7) if arrow == "→" else (right - 6, left + 6, 7)
    return [
        f'<path d="M{start:.1f} {y}H{end:.1f}m{step} -5l{-step} 5l{step} 5" fill="none" stroke="currentColor" '
        'stroke-width="1.6"/>'
    ]


def draw_legend(kinds: list[str], y: float) -> list[str]:
    shapes, x = [], 2.0
    for kind in kinds:
        shapes.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" fill="{COLOUR[kind]}"/>')
        shapes.append(f'<text x="{x + 17}" y="{y}" font-size="12">{MEANING[kind]}</text>')
        x += 40 + 7 * len(MEANING[kind])
    return shapes


def text(words: str, x: float, y: float, size: int = 14) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="middle">{escape(words)}</text>'


if __name__ == "__main__":
    print(draw_law(sys.argv[1]))
