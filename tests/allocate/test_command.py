"""The command: its two examples, its files, and one clear line for what is impossible."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import deadweight
from deadweight.allocate.profile import Profile
from deadweight.cli import main

Said = tuple[int, str, str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["deadweight", "allocate", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return (int(stop.value.code or 0), *capsys.readouterr())

    return call


def test_the_curve_of_one_lag_is_shown_with_its_minimum(run: Callable[..., Said]) -> None:
    code, out, err = run("bound", "--budget", "128", "--token-dim", "16")
    assert (code, err) == (0, "")
    for row in ("1    128  1.326", "8     16  0.166", "9  14.22  0.481", "80    1.6  0.965"):
        assert row in out
    assert "bound 0.1658 with 1 lag and 8 heads" in out


def test_the_four_gram_is_eight_heads_of_eight_for_each_lag(run: Callable[..., Said]) -> None:
    code, out, _ = run("bound", "--budget", "256", "--token-dim", "8", "--lags", "4", "--json", "-")
    found = json.loads(out)["optimum"]
    assert code == 0 and (found["lags"], found["heads"], found["sizes"]) == (4, [8] * 4, [8] * 4)


def test_files_are_written_beside_the_report(run: Callable[..., Said], tmp_path: Path) -> None:
    json_file, plot = tmp_path / "b.json", tmp_path / "b.svg"
    code, out, _ = run("bound", "--budget", "64", "--profile", "power:1", "--token-dim", "8", "--json", json_file,
                       "--plot", plot)  # fmt: skip
    assert code == 0 and "bound" in out and plot.read_text().startswith("<?xml")
    found = json.loads(json_file.read_text())
    assert min(found["curve"]["error"]) >= found["optimum"]["error"] >= found["relaxed"]["error"]
    assert len(found["task"]["profile"]) == 32


def test_constraints_reach_the_solver(run: Callable[..., Said]) -> None:
    words = "--budget 512 --profile power:1 --token-dim 20 --multiple 8 --one-size --sharing 2 --use-lags 3 --json -"
    found = json.loads(run("bound", *words.split())[1])
    assert found["optimum"]["lags"] == 3 and set(found["optimum"]["sizes"]) <= {8, 16, 24}
    assert len(set(found["optimum"]["sizes"])) == 1 and all(h % 2 == 0 for h in found["optimum"]["heads"])
    tight = json.loads(run("bound", *words.split(), "--kv-bytes", "256")[1])
    assert tight["limit"]["name"].startswith("cache") and tight["optimum"]["width"] <= 128
    flops = json.loads(run("bound", *words.split(), "--flops", "50000", "--width", "64", "--context", "10")[1])
    assert flops["limit"]["name"].startswith("FLOP") and flops["optimum"]["width"] * 4 * (64 * 1.5 + 10) <= 50000


def test_a_plan_is_shown_drawn_and_written_as_a_run(run: Callable[..., Said], tmp_path: Path) -> None:
    toml, plot, data = tmp_path / "plan.toml", tmp_path / "plan.svg", tmp_path / "plan.json"
    words = ["plan", "--profile", "power:1", "--token-dim", "16", "--saturation", "1,1,0.75,0.5"]
    code, out, _ = run(*words, "--toml", toml, "--plot", plot, "--json", data)
    assert code == 0 and "262,144" in out and plot.read_text().startswith("<?xml")
    model, told = tomllib.loads(toml.read_text())["model"], json.loads(data.read_text())
    assert model["heads"] == told["plan"]["heads"] and model["d_qk"] == told["plan"]["size"]
    assert sum(told["plan"]["parameters"]) == sum(told["equal_heads"]["parameters"])
    assert tomllib.loads(run(*words, "--toml", "-")[1])["model"] == model


def test_a_plan_from_a_text_trains_on_that_text(run: Callable[..., Said], tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the log.\n" * 600, encoding="utf-8")
    words = ["plan", "--profile", f"text:{text}", "--lags", "4", "--tokenizer", "bpe:260", "--toml", "-"]
    assert tomllib.loads(run(*words)[1])["data"] == {"text": str(text), "tokenizer": "bpe:260"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bound --budget 7 --multiple 8 --token-dim 4", "the nearest feasible budget D is 8"),
        ("bound --budget 64 --token-dim 4 --kv-bytes 1", "the nearest feasible cache budget"),
        ("bound --budget 64 --token-dim 4 --kv-bytes nan", "found kv_bytes = nan"),
        ("bound --budget 64 --token-dim 4 --flops 10", "without d_model"),
        ("bound --budget 64", "found no token dimension"),
        ("bound --budget 64 --profile power:nan --token-dim 4", "found 'nan' for its number"),
        ("bound --budget 64 --profile bad.csv --token-dim 4", "has the columns lag, weight; expected lag and norm"),
        ("bound --budget 64 --profile negative.json --token-dim 4", "found -1.0 at lag 2"),
        ("bound --budget 64 --profile text:missing.txt", "missing.txt does not exist"),
        ("bound --budget 64 --token-dim 4 --plot no/where.svg", "does not exist; expected a file"),
        ("bound --budget 64 --token-dim 4 --plot curve.exe", "expected a name that ends in .svg or .png"),
        ("bound --budget 64 --token-dim 4 --epsilon -1", "found epsilon = -1.0"),
        ("plan --profile flat --saturation 1,x", "found --saturation '1,x'"),
        ("plan --profile flat --saturation 1,1", "found 2 saturation factors for 4 layers"),
        ("plan --profile flat --heads 3", "found 3 heads for d_model = 128"),
        ("plan --profile flat --json - --toml -", "expected one of them on standard output"),
    ],
)
def test_an_impossible_request_is_one_line_and_exit_status_two(
    run: Callable[..., Said], arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("lag,weight\n1,1\n")
    (tmp_path / "negative.json").write_text("[1, -1]")
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert words in err


def test_the_library_takes_names_numbers_and_profiles() -> None:
    found = [
        deadweight.allocate(profile, 64, d_token=8).groups
        for profile in ([1.0, 0.5, 0.25], Profile((1.0, 0.5, 0.25), "given", d_token=3))
    ]
    assert found[0] == found[1]
    assert deadweight.allocate("power:1", 64, d_token=8, lags=3).task.profile == pytest.approx((1, 1 / 2, 1 / 3))


def test_a_pilot_run_says_how_much_each_layer_saturates(run: Callable[..., Said], tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("the cat sat on the mat, and the dog lay by the door. " * 900)
    small = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "32", "--pilot-steps", "3"]
    code, out, err = run("plan", "--profile", f"text:{text}", "--saturation", "pilot", *small, "--json", "-")
    assert code == 0, err
    assert "saturation after 3 steps on" in err
    found = json.loads(out)["saturation"]
    assert len(found) == 2 and max(found) == 1 and 0 < min(found) < 1


def test_an_impossible_plan_is_refused_before_the_pilot_run(run: Callable[..., Said]) -> None:
    code, _, err = run("plan", "--saturation", "pilot", "--width", "32", "--heads", "2", "--multiple", "64")
    assert code == 2 and "pilot" not in err and "nearest feasible" in err
