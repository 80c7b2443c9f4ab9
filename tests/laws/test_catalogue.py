"""A law is data: the files of its folder are the catalogue, no other file names a code, a law may come from outside."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.claims.claim import Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.errors import DeadweightError
from deadweight.graph.node import Node
from deadweight.laws.catalogue import every_law
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.laws.page import find_page, pages
from deadweight.proof.labels import scramble
from deadweight.proof.shift import Shift
from deadweight.proof.steps import Step
from deadweight.rewrite.shifts import rewrite_shift
from deadweight.search.prover import Prover

PACKAGE = Path(deadweight.__file__).parent
TIMES_ZERO = Title("DW900", "times-zero")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    """Vectors that are read once, in a product with the number 0."""
    for node in prover.parameters():
        readers = prover.graph.users[node.name]
        if len(node.shape) == 1 and len(readers) == 1 and readers[0].op == "aten.mul" and 0 in readers[0].args:
            yield dead(node, readers[0])


def dead(node: Node, product: Node) -> ShiftClaim:
    groups = torch.arange(1, node.shape[0] + 1)
    moved = Shift(scramble(groups), groups.to(torch.int32), fixed=True)
    steps = (
        Step(node.name, node.op, "each element moves by itself", "shifted", moved, "starts"),
        Step(product.name, product.op, "zero times anything is zero", "unchanged"),
    )
    return ShiftClaim(law=TIMES_ZERO, node=node.name, dof=len(groups), verdict="dead", steps=steps, groups=groups)


LAW = Law(
    title=TIMES_ZERO,
    fix="leave it out",
    searches=(Search(5, find),),
    rewriting=Rewriting(order=5, make=rewrite_shift),
    markdown="# DW900 times-zero: times zero\n\nZero times anything is zero.\n\n## What to do\nLeave it out.\n",
)


class Switched(nn.Module):
    """A bias that is switched off by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.write, self.read, self.factor = nn.Linear(3, 4), nn.Linear(4, 2), factor
        self.off = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(torch.tanh(self.write(x) + self.factor * self.off))


@pytest.fixture
def inputs() -> tuple[Tensor]:
    return (torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),)


def test_the_files_of_the_folder_are_the_catalogue() -> None:
    files = {f.stem[:5].upper() for f in (PACKAGE / "laws").glob("dw*.py")}
    assert {law.title.code for law in every_law().laws} == files
    assert every_law().pages == pages()


def test_no_file_but_a_law_s_own_names_its_code() -> None:
    for file in PACKAGE.rglob("*.py"):
        own = file.stem[:5].upper() if file.parent.name == "laws" else ""
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.fullmatch(r"DW\d{3}", node.value) or node.value == own, (file, node.lineno)


def test_no_two_searches_and_no_two_rewritings_have_the_same_turn() -> None:
    turns = [search.order for _, search in every_law().in_search_order()]
    rewritings = [law.rewriting.order for law in every_law().laws if isinstance(law.rewriting, Rewriting)]
    assert len(set(turns)) == len(turns)
    assert len(set(rewritings)) == len(rewritings)


def test_a_law_from_outside_is_found_counted_and_explained(inputs: tuple[Tensor]) -> None:
    model, laws = Switched(0.0), every_law().with_law(LAW)
    without = deadweight.audit(model, inputs, complete=True)
    result = deadweight.audit(model, inputs, complete=True, laws=laws)
    (finding,) = [f for f in result.findings if f.code == "DW900"]
    assert (finding.law, finding.parameter, finding.dof, finding.verdict) == ("times-zero", "off", 4, "dead")
    assert finding.evidence == 0.0
    assert without.completeness is not None
    assert result.completeness is not None
    assert without.completeness.measured - without.completeness.explained == 4
    assert result.completeness.measured == result.completeness.explained
    assert dict(result.completeness.by_law)["DW900"] == 4
    assert find_page("times-zero", laws.pages).remedy == "Leave it out."
    with pytest.raises(DeadweightError, match="no law is called 'times-zero'"):
        find_page("times-zero")


def test_a_law_from_outside_is_carried_out(inputs: tuple[Tensor]) -> None:
    model = Switched(0.0)
    result = deadweight.reduce(model, layout="stock", inputs=inputs, laws=every_law().with_law(LAW), select=["DW900"])
    assert [(s.code, s.law, s.parameter, s.saves) for s in result.steps] == [("DW900", "times-zero", "off", 4)]
    assert result.module is not None
    assert not result.module.get_parameter("off").any()
    assert model.off.all()
    assert torch.equal(result.module(*inputs), model(*inputs))


def test_it_is_silent_where_the_factor_is_not_zero(inputs: tuple[Tensor]) -> None:
    result = deadweight.audit(Switched(2.0), inputs, laws=every_law().with_law(LAW))
    assert not [f for f in result.findings if f.code == "DW900"]


def test_a_false_law_from_outside_is_contradicted(inputs: tuple[Tensor]) -> None:
    """The checker replays its step, whatever the law says."""

    def find_any(prover: Prover) -> Iterator[ShiftClaim]:
        node = prover.graph.nodes[prover.graph.node_of["off"]]
        yield dead(node, prover.graph.users[node.name][0])

    false = dataclasses.replace(LAW, searches=(Search(5, find_any),))
    result = deadweight.audit(Switched(2.0), inputs, laws=every_law().with_law(false))
    assert not [f for f in result.findings if f.code == "DW900"]
    assert [u.why for u in result.unknown if u.why.startswith("DW900: the proof does not replay")]


def test_every_law_says_what_to_write_in_a_short_sentence_without_a_full_stop() -> None:
    for law in every_law().laws:
        assert 10 <= len(law.fix) <= 80 and not law.fix.endswith("."), law.title
        assert not law.avoidable or not law.fix.startswith("nothing"), "what a flag avoids has a fix in code"


def test_only_the_whole_projection_is_proved_again_with_every_block_in_place() -> None:
    assert [law.title.name for law in every_law().laws if law.needs_all_blocks] == ["whole-projection"]


@pytest.mark.parametrize("select", ["key-bias", "DW002", ["key-bias"], ("dw002",)])
def test_laws_are_selected_by_code_or_name_as_text_or_in_a_list(select: str | list[str]) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    result = deadweight.audit(layer, (x, x, x), select=select)
    assert [f.code for f in result.findings] == ["DW002"]
    assert "DW002" not in {f.code for f in deadweight.audit(layer, (x, x, x), ignore=select).findings}


def test_a_law_that_does_not_exist_is_refused_and_not_taken_for_one_without_findings() -> None:
    for options in ({"select": ["key-bais"]}, {"ignore": "key-bais"}):
        with pytest.raises(DeadweightError, match="no law is called 'key-bais': did you mean key-bias"):
            deadweight.audit(nn.Linear(2, 2), torch.randn(1, 2), **options)
        with pytest.raises(DeadweightError, match="no law is called"):
            deadweight.reduce(nn.Linear(2, 2), inputs=torch.randn(1, 2), **options)
