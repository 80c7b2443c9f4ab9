"""The pytest plugin, the pre-commit hook and the action of GitHub, each in a repository that the test makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
TEST = """
import NAME
import torch

def test_the_model_wastes_nothing(assert_no_deadweight):
    assert_no_deadweight(NAME.Attention(), torch.randn(2, 5, 8))
"""


def test_the_flag_adds_a_test_for_every_target_and_without_it_there_is_none(project) -> None:
    project.settings('targets = ["TARGET"]\nfail-on = "dead"')
    done = project.call(*PYTEST, "--deadweight")
    assert done.returncode == 1, done.stdout
    assert f"deadweight::{project.target}" in done.stdout and "build the key projection with bias=False" in done.stdout
    assert "DEBUG" not in done.stdout and "Traceback" not in done.stdout
    assert project.call(*PYTEST).returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_test_of_one_target_says_nothing_about_what_is_accepted_for_another(project) -> None:
    accept = 'accept = [{ parameter = "elsewhere.bias", reason = "in another target" }]'
    project.settings(f'targets = ["TARGET"]\nfail-on = "dead"\n{accept}')
    done = project.call(*PYTEST, "--deadweight")
    assert done.returncode == 1 and "k.bias" in done.stdout and "elsewhere" not in done.stdout
    assert "no finding is left to accept for elsewhere.bias" in project.call("deadweight", "audit").stdout


def test_the_flag_without_targets_is_wrong_usage(project) -> None:
    project.settings('fail-on = "dead"')
    done = project.call(*PYTEST, "--deadweight")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "has no targets" in done.stderr


def test_the_fixture_fails_on_a_dead_bias_and_passes_without_it(project) -> None:
    (project.folder / "test_model.py").write_text(TEST.replace("NAME", project.name), encoding="utf-8")
    done = project.call(*PYTEST)
    assert done.returncode == 1 and f"k.bias is dead (real), 8 numbers too many ({project.file.name}:" in done.stdout
    assert "DEBUG" not in done.stdout, "torch's own log does not drown the list"
    project.write(bias=False)
    assert project.call(*PYTEST).returncode == 0


def commit(project) -> None:
    """A repository of git with everything in it."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    for arguments in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "--no-verify", "-m", "all")):
        assert project.call("git", *arguments).returncode == 0


@pytest.fixture
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the hook's definition, as pre-commit would clone it."""
    folder = tmp_path_factory.mktemp("hooks")
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", folder)
    who = {f"GIT_{role}_{part}": "a@example.org" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "hook")):
        subprocess.run(("git", "-C", str(folder), *arguments), check=True, env={**os.environ, **who})
    return folder


def test_the_hook_of_pre_commit_fails_on_a_dead_bias_and_passes_without_it(
    project, hooks: Path, tmp_path: Path
) -> None:
    project.settings('targets = ["TARGET"]')
    commit(project)
    try_repo = (sys.executable, "-m", "pre_commit", "try-repo", str(hooks), "deadweight", "--all-files")
    home = {"PRE_COMMIT_HOME": str(tmp_path / "cache")}
    done = project.call(*try_repo, **home)
    assert done.returncode == 1 and "DW002 key-bias: k.bias" in done.stdout, done.stdout + done.stderr
    project.write(bias=False)
    done = project.call(*try_repo, **home)
    assert done.returncode == 0 and "Passed" in done.stdout, done.stdout + done.stderr


def run_action(
    project, environment: dict[str, str] | None = None, **given: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run the steps of action.yml as GitHub does: inputs with their defaults, conditions, environment, bash -e."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    inputs = {name: str(value["default"]) for name, value in action["inputs"].items()} | given
    assert set(inputs) == set(action["inputs"]), "only inputs that the action has"
    done = []
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "inputs go through the environment: no input can become a command"
        condition = step.get("if")
        if condition is not None and not inputs[condition.removeprefix("inputs.").removesuffix(" != ''")]:
            continue
        filled = {key: inputs[value[len("${{ inputs.") : -len(" }}")]] for key, value in step.get("env", {}).items()}
        done.append(project.call("bash", "-e", "-o", "pipefail", "-c", step["run"], **filled, **(environment or {})))
        if done[-1].returncode:
            break
    return done


def test_the_action_annotates_and_fails_and_writes_sarif(project) -> None:
    project.settings('targets = ["TARGET"]')
    first, last = run_action(project, install="", **{"sarif-file": "out.sarif"})
    assert first.returncode == 0 and last.returncode == 1, first.stderr + last.stderr
    assert f"::error file={project.file.name},line={project.key_line},title=DW002 key-bias::" in last.stdout
    report = json.loads((project.folder / "out.sarif").read_text(encoding="utf-8"))
    assert [r["ruleId"] for r in report["runs"][0]["results"]] == ["DW002"]


@pytest.mark.parametrize(("level", "given", "status"), [("gauge", "", 1), ("dead", "", 0), ("gauge", "dead", 0)])
def test_the_action_fails_by_the_projects_settings_unless_it_is_told(
    project, level: str, given: str, status: int
) -> None:
    project.write(bias=False)  # what is left is a gauge
    project.settings(f'targets = ["TARGET"]\nfail-on = "{level}"')
    (only,) = run_action(project, install="", **{"fail-on": given})
    assert only.returncode == status, only.stdout + only.stderr


@pytest.mark.parametrize(
    ("given", "installed"), [({}, "/the action"), ({"install": "deadweight torch"}, "deadweight torch")]
)
def test_the_action_installs_its_own_version_unless_it_is_told(project, given: dict, installed: str) -> None:
    programs = project.folder / "bin"
    programs.mkdir()
    for name in ("python", "deadweight"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    place = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "GITHUB_ACTION_PATH": "/the action"}
    first, last = run_action(project, environment=place, **given)
    assert first.stdout == f"python -m pip install {installed}\n", first.stderr
    assert last.stdout == "deadweight audit --check --output-format github\n"


def test_the_action_passes_for_a_model_without_findings_and_takes_arguments(project) -> None:
    project.write(bias=False)
    (only,) = run_action(project, install="", arguments=f"{project.target} --select key-bias")
    assert only.returncode == 0, only.stdout + only.stderr


def test_the_shell_completes_commands_options_and_laws(project) -> None:
    words = {"_DEADWEIGHT_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
    done = project.call("deadweight", **words, COMP_WORDS="deadweight audit --select key")
    assert done.stdout.split() == ["key-bias"], done.stdout + done.stderr
    done = project.call("deadweight", **{**words, "COMP_CWORD": "1"}, COMP_WORDS="deadweight au")
    assert done.stdout.split() == ["audit"]


def test_shapes_are_given_to_reduce_and_verify_as_to_audit(project, run) -> None:
    spec, shapes = f"{project.name}:Attention", ("--inputs", "2x5x8")
    assert run("reduce", spec, "out", *shapes)[0] == 0
    assert run("reduce", spec, "other", "--inputs", "2x5x9")[0] == 2
    assert (project.folder / "out").is_dir() and not (project.folder / "other").exists()
    assert run("verify", spec, spec, *shapes)[0] == 1, "two calls give two random models"
