"""A stream of which some reader sees only the first channels: these turn among themselves, and so do the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deadweight
from deadweight.claims.point import Point
from deadweight.search.unseen_directions import UnseenTurnClaim

WORDS, WIDTH, SEEN = 23, 6, 4
TOKENS = torch.arange(24).remainder(WORDS).reshape(4, 6)


class Stream(nn.Module):
    """A table, a block with a gate that reads the first channels, and a readout; norms without gains."""

    def __init__(self, see: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.gate = nn.Linear(SEEN, 1, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 5, bias=False), nn.Linear(5, WIDTH, bias=False)
        self.readout = nn.Linear(WIDTH, WORDS, bias=False)
        self.see, self.norm = see, norm

    def forward(self, ids: Tensor) -> Tensor:
        x = pairs(self.table(ids))
        seen = self.norm(x)
        x = x + torch.sigmoid(self.gate(self.see(seen[..., :SEEN]))) * self.down(torch.tanh(self.up(seen)))
        return self.readout(self.norm(x))


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), eps=0.1)  # large: scales of the table count


def layer(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), eps=0.1)  # large: scales of the table count


def turns(see: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> tuple[int, deadweight.Audit]:
    torch.manual_seed(0)
    result = deadweight.audit(Stream(see, norm), (TOKENS,), complete=True)
    assert result.completeness is not None and not result.completeness.unsound
    return sum(f.dof for f in result.findings if f.code == "DW012"), result


@pytest.mark.parametrize(
    ("norm", "dimensions"),
    [
        (rms, 6 + 1 + 2 * 3),  # rotations of 4 channels, of 2, and of these 2 against 3 that the gate does not see
        (layer, 3 + 0 + 2 * 3 - 1),  # those that keep the vector of ones
    ],
)
def test_channels_turn_with_those_that_are_read_alike_and_with_what_the_gate_does_not_see(
    norm: Callable[[Tensor], Tensor], dimensions: int
) -> None:
    found, result = turns(lambda x: x, norm)
    assert found == dimensions
    account = result.completeness
    left = int(norm is layer)  # a gate behind LayerNorm sees no sum of all channels: it lets the slice turn with it
    assert account is not None and account.explained == account.measured - left
    assert dict(account.by_law)["DW012"] == dimensions


def pairs(x: Tensor) -> Tensor:
    """Sums of neighbours: normed vectors of single words would be free, each by itself."""
    return x[:, 1:] + x[:, :-1]


class Gates(nn.Module):
    """A table, gates that read slices of the normed stream, and a readout."""

    def __init__(self, norm: Callable[[Tensor], Tensor], *slices: tuple[int, int, int]) -> None:
        super().__init__()
        self.table, self.norm, self.slices = nn.Embedding(WORDS, WIDTH), norm, slices
        self.gates = nn.ModuleList(nn.Linear(b - a, rows, bias=False) for a, b, rows in slices)
        self.readout = nn.Linear(WIDTH, 14, bias=False)  # more numbers than parameters

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(pairs(self.table(ids)))
        read = zip(self.gates, self.slices, strict=True)
        gates = [torch.sigmoid(gate(x[..., a:b])).sum(-1) for gate, (a, b, _) in read]
        return torch.tanh(self.readout(x)) * torch.stack(gates).prod(0)[..., None]


NESTED = [
    # channels 0-1 | 2-3 | 4-5; every channel turns with those of its block: 3 dimensions (with ones kept: 0)
    (rms, ((0, 2, 1), (0, 4, 1)), 3 + 2 * (2 - 1) + 2 * (4 - 2)),
    (rms, ((0, 2, 2), (0, 4, 1)), 3 + 0 + 2 * (4 - 3)),  # both channels are seen: these two turn no more
    (rms, ((0, 2, 5), (0, 4, 1)), 3 + 0 + 2 * (4 - 3)),  # five rows over two channels are two independent ones
    (rms, ((0, 2, 1), (0, 2, 1), (0, 4, 1)), 3 + 0 + 2 * (4 - 3)),  # and so are two gates of one row
    (layer, ((0, 2, 1), (0, 4, 1)), 0 + (2 * (2 - 1) - 1) + (2 * (4 - 2) - 1)),
    (layer, ((0, 2, 2), (0, 4, 1)), 0 + 0 + (2 * (4 - 3) - 1)),
    (rms, ((2, 4, 1), (0, 4, 1)), 3 + 2 * (2 - 1) + 2 * (4 - 2)),  # the inner slice may lie anywhere
]


@pytest.mark.parametrize(("norm", "slices", "dimensions"), NESTED)
def test_slices_within_slices_are_counted_to_the_last_dimension(
    norm: Callable[[Tensor], Tensor], slices: tuple[tuple[int, int, int], ...], dimensions: int
) -> None:
    torch.manual_seed(0)
    result = deadweight.audit(Gates(norm, *slices), (TOKENS,), complete=True)
    account = result.completeness
    assert account is not None and not account.unsound
    left = 2 * int(norm is layer)  # what gates behind LayerNorm leave: no sum of all channels reaches them
    assert account.explained == account.measured - left
    assert sum(f.dof for f in result.findings if f.code == "DW012") == dict(account.by_law)["DW012"] == dimensions


def test_slices_that_overlap_turn_within_their_blocks_alone() -> None:
    """Channels 0-3 and 2-5: blocks of two, three rotations; what else there is is not claimed."""
    torch.manual_seed(0)
    result = deadweight.audit(Gates(rms, (0, 4, 1), (2, 6, 1)), (TOKENS,), complete=True)
    account = result.completeness
    assert account is not None and not account.unsound and account.explained < account.measured
    assert sum(f.dof for f in result.findings if f.code == "DW012") == 3


class Biased(Gates):
    """A bias that is added to the slice, and so belongs to its channels."""

    def __init__(self) -> None:
        super().__init__(rms, (0, 4, 1))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(pairs(self.table(ids)))
        return torch.tanh(self.readout(x)) * torch.sigmoid(self.gates[0](x[..., :4] + self.bias))


def test_a_bias_of_the_slice_keeps_it_from_turning_with_the_rest(true_claims: Callable[..., Any]) -> None:
    _, claims = true_claims(Biased(), TOKENS)
    assert not [c for c in claims if isinstance(c, UnseenTurnClaim)]


def test_the_turn_across_slices_is_one_that_readers_do_not_see(true_claims: Callable[..., Any]) -> None:
    """Every motion of the claim, by hand: an antisymmetric X whose image of the gate's row stays in the slice."""
    graph, claims = true_claims(Gates(rms, (0, 4, 1)), TOKENS)
    claim = next(c for c in claims if isinstance(c, UnseenTurnClaim))
    values = {n: t.detach().double() for n, t in graph.tensors.items()}
    point = Point(graph, values, {graph.inputs[0]: TOKENS})
    table, readout, gate = (values[graph.node_of[n]] for n in ("table.weight", "readout.weight", "gates.0.weight"))
    for motion in claim.motions(point):
        turn = torch.linalg.lstsq(table, motion[graph.node_of["table.weight"]]).solution.T
        assert torch.allclose(turn, -turn.T, atol=1e-12)
        assert torch.allclose(motion[graph.node_of["readout.weight"]], -readout @ turn, atol=1e-12)
        assert float((gate @ turn[:4]).abs().max()) < 1e-12  # W·P·X = 0: the gate sees nothing of it
        assert graph.node_of["gates.0.weight"] not in motion


def test_channels_that_are_read_one_by_one_keep_the_stream_from_turning() -> None:
    """A function of each of the first four channels fixes these; nothing is said of the rest."""
    assert turns(torch.tanh, rms)[0] == turns(torch.tanh, layer)[0] == 0


def test_a_long_way_along_the_turns_nothing_changes() -> None:
    """The orthogonal maps that DW012 speaks of, applied by hand to the original; one across the slice does not do."""
    torch.manual_seed(0)
    model = Stream(lambda x: x, rms).double()
    before = model(TOKENS).detach()

    def turned(turn: Tensor) -> Tensor:
        again = Stream(lambda x: x, rms).double()
        again.load_state_dict(model.state_dict())
        with torch.no_grad():
            again.table.weight.copy_(again.table.weight @ turn.T)
            again.down.weight.copy_(turn @ again.down.weight)
            for reader in (again.up, again.readout):
                reader.weight.copy_(reader.weight @ turn.T)
            again.gate.weight.copy_(again.gate.weight @ turn[:SEEN, :SEEN].T)
            return again(TOKENS)

    blocks = [torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in (SEEN, WIDTH - SEEN)]
    assert float((turned(torch.block_diag(*blocks)) - before).abs().max()) < 1e-12
    across = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64))[0]
    assert float((turned(across) - before).abs().max()) > 1e-3
