"""A stream of which some reader sees only the first channels: these turn among themselves, and so do the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deadweight

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
        x = self.table(ids)
        seen = self.norm(x)
        x = x + torch.sigmoid(self.gate(self.see(seen[..., :SEEN]))) * self.down(torch.tanh(self.up(seen)))
        return self.readout(self.norm(x))


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), eps=1e-6)


def layer(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), eps=1e-6)


def turns(see: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> tuple[int, deadweight.Audit]:
    torch.manual_seed(0)
    result = deadweight.audit(Stream(see, norm), (TOKENS,), complete=True)
    assert result.completeness is not None and not result.completeness.unsound
    return sum(f.dof for f in result.findings if f.code == "DW012"), result


@pytest.mark.parametrize(
    ("norm", "dimensions"),
    [
        (rms, 6 + 1),  # rotations of 4 channels, and of 2
        (layer, 3 + 0),  # those that keep the vector of ones, of 3 dimensions and of 1
    ],
)
def test_channels_that_are_read_alike_turn_together(norm: Callable[[Tensor], Tensor], dimensions: int) -> None:
    found, result = turns(lambda x: x, norm)
    assert found == dimensions
    account = result.completeness
    assert account is not None and account.explained <= account.measured
    assert dict(account.by_law)["DW012"] == dimensions


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
