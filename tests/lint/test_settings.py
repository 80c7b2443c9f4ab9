"""What [tool.deadweight] says is what `deadweight audit` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadweight.errors import DeadweightError
from deadweight.lint.settings import Accepted, Target, parse_settings, read_settings


def test_a_folder_without_settings_has_the_defaults(tmp_path: Path) -> None:
    settings = read_settings(tmp_path)
    assert settings.targets == () and settings.fail_on is None and settings.output_format == "text"


def test_every_setting_is_read() -> None:
    table = {
        "targets": ["a.b:c", {"model": "d:e", "inputs": "2x64:int", "training": True, "length": 7}],
        "select": "key-bias,DW003",
        "ignore": ["mean-before-layernorm"],
        "accept": [{"parameter": "blocks.*.k.bias", "laws": ["key-bias"], "reason": "old checkpoints have it"}],
        "fail-on": "dead",
        "baseline": "known.json",
        "output-format": "github",
    }
    settings = parse_settings(table, Path("/somewhere"))
    assert settings.targets == (Target("a.b:c"), Target("d:e", "2x64:int", training=True, length=7))
    assert (settings.select, settings.ignore) == (("DW002", "DW003"), ("DW005",))
    assert settings.accept == (Accepted("blocks.*.k.bias", "old checkpoints have it", ("DW002",)),)
    assert (settings.fail_on, settings.output_format) == ("dead", "github")
    assert settings.baseline == Path("/somewhere/known.json")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"target": []}, "did you mean targets"),
        ({"targets": "a:b"}, "expected a list"),
        ({"targets": [{"inputs": "2x3"}]}, "package.module:callable"),
        ({"targets": [{"model": "a.b:c", "inputs": "2x64:itn"}]}, "found inputs '2x64:itn'"),
        ({"targets": [{"model": "a:b", "length": "7"}]}, "expected a whole number"),
        ({"targets": [{"model": "a:b", "trust-remote-code": 1}]}, "trust-remote-code = 1 .*expected true or false"),
        ({"targets": [{"model": "a:b", "length": 1}]}, "length = 1 .*expected 2 or more"),
        ({"baseline": 3}, "expected a string"),
        ({"targets": [{"model": "a:b", "output": "loss"}]}, "expected logits, probabilities"),
        ({"select": ["no-such-law"]}, "no law is called"),
        ({"select": [3]}, "names of laws"),
        ({"fail-on": "everything"}, "expected dead, folds, gauge"),
        ({"output-format": "xml"}, "expected text, json, github, sarif"),
        ({"accept": [{"parameter": "x"}]}, "the reason why"),
        ({"accept": [{"parameter": "x", "reason": " "}]}, "the reason why"),
        ({"accept": ["x"]}, "reason ="),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(table: dict, words: str) -> None:
    with pytest.raises(DeadweightError, match=words):
        parse_settings(table, Path())


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.deadweight\n")
    with pytest.raises(DeadweightError, match=r"pyproject.toml cannot be read .*expected TOML"):
        read_settings(tmp_path)


@pytest.mark.parametrize("text", ["tool = 3", "tool.deadweight = 3", 'tool.deadweight = ["audit"]'])
def test_a_value_in_place_of_the_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(DeadweightError, match=r"expected .*\[tool.deadweight\]"):
        read_settings(tmp_path)


def test_without_a_model_and_without_targets_there_is_nothing_to_audit(project, run) -> None:
    code, _, err = run("audit")
    assert code == 2 and "no MODEL and no targets" in err


def test_the_targets_are_audited_by_the_settings(project, run) -> None:
    project.settings('targets = ["TARGET"]\nselect = ["key-bias"]\nfail-on = "dead"')
    code, out, _ = run("audit")
    assert code == 1 and "DW002" in out and "DW009" not in out
    assert f"{project.file.name}:{project.key_line}: DW002 key-bias: k.bias: build the key projection" in out


def test_settings_are_for_targets_and_not_for_other_models(project, run) -> None:
    project.settings('targets = ["TARGET"]\nselect = ["key-bias"]\nfail-on = "dead"')
    assert run("audit", project.target)[0] == 1
    code, out, _ = run("audit", f"{project.name}:Attention")
    assert code == 0 and "DW009" in out


def test_the_command_line_goes_before_the_settings(project, run) -> None:
    project.settings('targets = ["TARGET"]\nselect = ["key-bias"]\nfail-on = "dead"')
    code, out, _ = run("audit", "--select", "query-key-basis")
    assert code == 0 and "DW009" in out and "DW002" not in out


def test_an_accepted_finding_passes_with_its_reason_and_another_does_not(project, run) -> None:
    project.settings(
        'targets = ["TARGET"]\nfail-on = "dead"\naccept = [{ parameter = "k.*", reason = "as in the paper" }]'
    )
    code, out, _ = run("audit")
    assert code == 0 and "accepted: as in the paper" in out
    project.settings(
        'targets = ["TARGET"]\nfail-on = "dead"\naccept = [{ parameter = "q.*", reason = "as in the paper" }]'
    )
    code, out, _ = run("audit")
    assert code == 1 and "no finding is left to accept for q.*" in out


@pytest.mark.parametrize(("level", "code"), [("dead", 1), ("folds", 1), ("gauge", 1)])
def test_a_dead_parameter_fails_at_every_level(project, run, level: str, code: int) -> None:
    assert run("audit", project.target, "--fail-on", level)[0] == code


@pytest.mark.parametrize(("level", "code"), [("dead", 0), ("folds", 0), ("gauge", 1)])
def test_a_gauge_fails_only_where_gauges_are_asked_for(project, run, level: str, code: int) -> None:
    project.write(bias=False)
    assert run("audit", project.target, "--fail-on", level)[0] == code


def test_gauges_alone_is_a_check_too(project, run) -> None:
    project.write(bias=False)
    assert run("audit", project.target, "--gauges")[0] == 1


def test_the_word_in_front_of_a_line_is_set_apart(project, run) -> None:
    _, out, _ = run("audit", project.target, "--gauges")
    lines = [line for line in out.splitlines() if f"{project.file.name}:" in line and "DW0" in line]
    assert {line.split(" ")[0] for line in lines} == {"error", "note"}
    assert len({line.index(project.file.name) for line in lines}) == 1


def test_exit_zero_reports_and_passes(project, run) -> None:
    code, out, _ = run("audit", project.target, "--check", "--exit-zero")
    assert code == 0 and "check: 1 finding fails" in out
