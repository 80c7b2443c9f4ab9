"""The drawing holds every parameter once, and draws equal blocks once."""

from __future__ import annotations

import dataclasses

from deadweight.audit.result import Audit, Finding, Unknown
from deadweight.report.html.layers import by_layer, spans_blocks
from deadweight.report.html.model_tree import Box, Cell, draw_model

from .parts import key_bias


def cells_of(box: Box) -> list[Cell]:
    return [*box.cells, *(c for inner in box.boxes for c in cells_of(inner))]


def titles_of(box: Box) -> list[str]:
    return [box.title, *(t for inner in box.boxes for t in titles_of(inner))]


def two_layers(*findings: Finding, unknown: tuple[Unknown, ...] = ()) -> Audit:
    layers = [(f"h.{i}.attn.c_attn.{leaf}", shape) for i in (0, 1) for leaf, shape in LEAVES]
    shapes = (*layers, ("norm.weight", (8,)))
    return Audit("two", 500, findings, unknown, shapes=shapes)


LEAVES = (("weight", (8, 24)), ("bias", (24,)))


def test_the_boxes_of_the_demo_add_up_to_its_parameters_and_findings(demo_audit: Audit) -> None:
    tree = draw_model(demo_audit)
    assert tree.box.elements == demo_audit.parameters
    assert tree.box.dof + sum(dof for *_, dof in tree.across) == demo_audit.redundant


def test_equal_blocks_are_drawn_once() -> None:
    tree = draw_model(two_layers(key_bias(0), key_bias(1)))
    assert "h.0–1.attn.c_attn" in titles_of(tree.box)
    assert [c.filter for c in cells_of(tree.box)] == ["h.*.attn.c_attn.weight", "h.*.attn.c_attn.bias", "norm.weight"]
    assert tree.box.elements == 2 * (8 * 24 + 24) + 8


def test_blocks_are_drawn_under_the_whole_path_of_their_list() -> None:
    names = [f"bert.encoder.layer.{i}.{part}.weight" for i in range(4) for part in ("attention", "output")]
    shapes = tuple((name, (3 if ".3." in name else 2,)) for name in ("bert.table", *names))
    titles = titles_of(draw_model(Audit("bert", 1, (), shapes=shapes)).box)
    assert titles == ["bert", "encoder.layer.0–2", "attention", "output", "encoder.layer.3", "attention", "output"]


def test_blocks_that_differ_in_a_verdict_are_drawn_apart() -> None:
    titles = titles_of(draw_model(two_layers(key_bias(0))).box)
    assert "h.0.attn.c_attn" in titles
    assert "h.1.attn.c_attn" in titles


def test_a_parameter_has_the_colour_of_its_strongest_verdict() -> None:
    gauge = dataclasses.replace(key_bias(0), verdict="gauge", code="DW009", slice=None)
    cells = {c.filter: c for c in cells_of(draw_model(two_layers(gauge, key_bias(0))).box)}
    assert cells["h.0.attn.c_attn.bias"].kind == "dead"
    assert cells["h.0.attn.c_attn.bias"].marks == (("dead", 8), ("gauge", 8))
    assert cells["norm.weight"].kind == "none"


def test_a_parameter_about_which_nothing_is_known_is_marked() -> None:
    tree = draw_model(two_layers(unknown=(Unknown("norm.weight", "aten.tanh", "why"),)))
    assert {c.filter: c.kind for c in cells_of(tree.box)}["norm.weight"] == "unknown"


def test_a_finding_about_all_blocks_is_in_no_cell() -> None:
    stream = dataclasses.replace(key_bias(0), code="DW012", into=tuple(f"h.{i}.attn.c_attn.weight" for i in range(3)))
    assert spans_blocks(stream)
    assert not spans_blocks(dataclasses.replace(stream, into=stream.into[:2]))
    tree = draw_model(two_layers(stream))
    assert all(c.kind == "none" for c in cells_of(tree.box))
    assert tree.across == (("DW012", "key-bias", 8),)


def test_layers_add_up_to_what_is_redundant(demo_audit: Audit) -> None:
    layers = by_layer(((f.parameter, f.verdict, f.dof) for f in demo_audit.findings), dict(demo_audit.shapes))
    assert sum(row.total for s in layers.stacks for row in s.rows) + layers.outside == demo_audit.redundant
    assert [(s.path, s.n_blocks) for s in layers.stacks] == [("transformer.h", 4)]


def test_thousands_of_different_parameters_are_not_all_drawn() -> None:
    shapes = tuple((f"part_{i}.weight", (i + 1,)) for i in range(5000))
    tree = draw_model(Audit("wide", 1, (), shapes=shapes))
    assert len(cells_of(tree.box)) + tree.left_out == 5000
    assert tree.left_out > 0
