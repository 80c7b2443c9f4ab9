"""Every mistake in the settings of a run is reported before any work is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deadweight.errors import DeadweightError
from deadweight.train import make_run, read_run
from deadweight.train.settings import as_toml

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt table": ({"trian": {}}, "unknown table trian; did you mean train?"),
    "a misspelt key": ({"train": {"learning_rat": 1e-3}}, "did you mean learning_rate?"),
    "a misspelt model key": ({"model": {"n_layer": 2}}, "did you mean n_layers?"),
    "a key that is like nothing": ({"data": {"zzz": 1}}, "expected one of text, valid"),
    "a key in the wrong table": ({"data": {"context": 64}}, "found context in [data]; expected it in [model]"),
    "a setting of training in the model": ({"model": {"steps": 3}}, "found steps in [model]; expected it in [train]"),
    "more layers than memory": ({"model": {"n_layers": 10**9}}, "n_layers = 1000000000; expected at most 10,000"),
    "a word for a number": ({"train": {"steps": "many"}}, "steps = 'many'; expected a whole number"),
    "a truth for a number": ({"train": {"steps": True}}, "steps = True; expected a whole number"),
    "no steps": ({"train": {"steps": 0}}, "steps = 0; expected a number above zero"),
    "a negative decay": ({"train": {"weight_decay": -0.1}}, "weight_decay = -0.1; expected zero or more"),
    "an infinite rate": ({"train": {"learning_rate": float("inf")}}, "learning_rate = inf; expected a number above"),
    "an unknown schedule": ({"train": {"schedule": "linear"}}, "schedule = 'linear'; expected cosine or wsd"),
    "an unknown precision": ({"train": {"precision": "fp8"}}, "precision = 'fp8'; expected auto, fp32 or bf16"),
    "all text to be judged on": ({"data": {"valid_share": 1.0}}, "valid_share = 1.0; expected a number between"),
    "heads that do not divide": ({"model": {"d_model": 30, "heads": 4}}, "4 heads for d_model = 30"),
    "identity Q of another width": (
        {"model": {"d_model": 32, "heads": 4, "d_qk": 4, "query": "identity"}},
        "query = identity with 4 heads of 4; expected heads × size = d_model = 32",
    ),
    "identity K with grouped keys": (
        {"model": {"d_model": 32, "heads": 4, "key_heads": 2, "key": "identity"}},
        "grouped keys",
    ),
    "a word for a truth": (
        {"model": {"tie_word_embeddings": "false"}},
        "tie_word_embeddings = 'false'; expected true or false",
    ),
    "a mean that forgets nothing": (
        {"train": {"beta1": 1}},
        "beta1 = 1; expected a number from 0 up to, but not including, 1",
    ),
    "a seed of too many digits": ({"train": {"seed": 10**30}}, "expected a number below 2⁶³"),
    "a table that is none": ({"model": 3}, "expected a table [model]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(name: str) -> None:
    tables, message = WRONG[name]
    with pytest.raises(DeadweightError) as error:
        make_run(tables)
    assert message in str(error.value)


def test_a_run_reads_back_from_its_own_file(tmp_path: Path) -> None:
    run = make_run(
        {
            "model": {"d_model": 32, "heads": [2, 4], "n_layers": 2, "query": ["full", "identity"], "biases": ["key"]},
            "data": {"text": 'a "quoted" \\ name'},
            "train": {"steps": 7, "learning_rate": 3e-4, "tensorboard": True},
        }
    )
    file = tmp_path / "run.toml"
    file.write_text(as_toml(run), encoding="utf-8")
    assert read_run(file) == run


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train\nsteps=1", encoding="utf-8")
    with pytest.raises(DeadweightError, match="is not valid TOML"):
        read_run(file)
    with pytest.raises(DeadweightError, match="cannot be read"):
        read_run(tmp_path / "absent.toml")


def test_a_mistake_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nd_model = 30\nheads = 4\n", encoding="utf-8")
    program = (
        "import sys\nfrom deadweight.cli.main import app\nfrom deadweight.errors import DeadweightError\n"
        "try:\n    app(sys.argv[1:])\nexcept DeadweightError as error:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules, error)\n"
    )
    for command in (
        ["train", str(tmp_path / "out"), "--config", str(file)],
        ["sweep", str(file), str(tmp_path / "out")],
    ):
        said = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=120)
        assert said.stdout.startswith(f"False False {file}: [model] cannot be built: found layer 0: 4 heads"), (
            said.stderr
        )
        assert not (tmp_path / "out").exists()


def test_a_finished_run_is_reported_before_torch_is_imported(tmp_path: Path, text: str) -> None:
    flags = ["--text", text, "--steps", "2", "--width", "16", "--layers", "1", "--heads", "2", "--context", "16"]
    program = "import sys\nfrom deadweight.cli.main import app\napp(sys.argv[1:], standalone_mode=False)\n"
    program += "print('torch' in sys.modules)\n"
    command = [sys.executable, "-c", program, "train", str(tmp_path / "out"), *flags]
    first, again = (subprocess.run(command, capture_output=True, text=True, timeout=240) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout.endswith("True\n") and "is finished" not in first.stdout
    assert again.stdout.endswith("False\n") and "is finished: 2 steps done, 0 steps left" in again.stdout


def test_every_key_of_the_model_can_be_set() -> None:
    assert make_run({"model": {"norm": "rms", "positions": "rotary", "biases": "all"}}).model["biases"]
