"""The decoding benchmark runs without a GPU, all its rivals compute the same, and its page says what was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def bench(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("decode")


def test_a_tiny_model_is_decoded_by_all_rivals_from_a_cache_of_half_the_size(bench: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    options = ["--config", "tiny", "--shapes", "2x16,3x24", "--turns", "1", "--filled", "0.75", "--json", str(file)]
    options += ["--compiled", "2x16"]
    done = CliRunner().invoke(bench.app, ["run", *options])
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["speed"]
    assert len(rows) == 2 * len(bench.RIVALS) + len(bench.COMPILED) and {r["filled"] for r in rows} == {12, 18}
    sizes = {r["rival"].partition(",")[0]: r["bytes_per_token"] for r in rows}
    assert sizes == {"original": 512.0, "slim": 256.0, "slim with late keys": 256.0}
    assert all(0 <= r["difference"] < 1e-4 for r in rows)  # float32
    page = tmp_path / "decode.md"
    assert CliRunner().invoke(bench.app, ["report", str(file), "--markdown", str(page)]).exit_code == 0
    assert page.read_text().count("\n| tiny |") == len(rows)


def test_the_kernel_alone_says_what_it_needs(bench: ModuleType, tmp_path: Path) -> None:
    if bench.CUDA:
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(bench.app, ["kernel", "--json", str(tmp_path / "kernel.json")])
    assert done.exit_code == 0 and "needs Triton and a GPU" in done.output
    query, key, value, mask, _, late, keys, values, _ = bench.kernel_case(8, 4, 16, 2, 32, "half", True, 0)
    assert (key.shape, value.shape) == ((2, 1, 32, 32), (2, 1, 32, 32)) and mask.shape == (2, 1, 1, 32)
    assert keys == values == (32,) and query.shape == (2, 8, 1, 32) and not late
    query, key, _, _, _, (maps, shift, *_), *_ = bench.kernel_case(8, 4, 16, 2, 32, "late", True, 2)
    assert query.shape == (2, 8, 1, 16) and key.shape == (2, 2, 32, 16) and maps.numel() == 2 * 32 * 16
    assert shift.shape == (2, 2, 16)
