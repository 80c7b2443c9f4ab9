"""The profile of a training step: kernels are told apart by name, and a step is timed on any machine."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from deadweight.errors import DeadweightError


@pytest.fixture
def profile(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("step_profile")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopB_NNT", "matrix products"),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("triton_red_fused_native_layer_norm_backward_3", "norms, GELU, sums (compiled)"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer and clipping"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(profile: ModuleType, kernel: str, kind: str) -> None:
    assert profile.kind_of(kernel) == kind


def test_a_step_is_timed_and_an_unknown_case_is_refused(profile: ModuleType) -> None:
    rows = profile.measured("tiny", profile.CASES["tiny"], torch.device("cpu"), 2)
    assert [row.way for row in rows] == ["kernel by kernel"]
    assert rows[0].tokens_per_second == pytest.approx(4 * 32 / rows[0].milliseconds * 1e3, rel=0.01)
    with pytest.raises(DeadweightError, match="found --only large; expected one of 38 M"):
        profile.main(only=["large"])
