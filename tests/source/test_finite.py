import pytest
import torch
from torch import nn

from deadweight.errors import DeadweightError
from deadweight.source.finite import check_finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(value: float) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        module[1].bias[0] = value
    with pytest.raises(DeadweightError, match=r"1\.bias holds 1 values"):
        check_finite(module)


def test_finite_and_meta_weights_pass() -> None:
    check_finite(nn.Linear(2, 2))
    check_finite(nn.Linear(2, 2, device="meta"))
