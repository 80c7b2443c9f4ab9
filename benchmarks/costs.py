"""What the redundancy of public checkpoints costs: parameters, bytes and FLOPs per token, by an audit of each config.

python benchmarks/costs.py                                  all checkpoints; goes on where it was stopped
python benchmarks/costs.py --names "GPT-2,LLaMA 3.1 8B"     only these, again
python benchmarks/costs.py --read --markdown docs/costs.md  only the page

The configs are in `benchmarks/checkpoints.json`: the sizes of each checkpoint's public config.json, entered by hand,
with its hub id. Each is built on the meta device, at its full width and depth and in its own precision, and audited as
`deadweight audit config.json` does it. Nothing is downloaded. A checkpoint that fails is a row with its reason.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from costs_report import costs_page
from rich.console import Console
from rich.progress import track

import deadweight
from deadweight.audit.result import Audit, Finding, sum_payoffs
from deadweight.errors import DeadweightError
from deadweight.report.record import circumstances, load_record, save_record

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "costs.json"
CHECKPOINTS = ROOT / "benchmarks" / "checkpoints.json"
Row = dict[str, Any]


def load_checkpoints() -> list[Row]:
    """Every checkpoint: its name, hub id, config, and the parameter count that is published, where one is known."""
    rows: list[Row] = json.loads(CHECKPOINTS.read_text(encoding="utf-8"))
    return rows


def cost_of(checkpoint: Row) -> Row:
    """The row of one checkpoint."""
    start = time.process_time()
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(checkpoint["config"]), encoding="utf-8")
            audit = deadweight.audit(str(file))
    except DeadweightError as error:
        return {"name": checkpoint["name"], "error": str(error)}
    return {
        "name": checkpoint["name"],
        "hub": checkpoint["hub"],
        "type": checkpoint["config"]["model_type"],
        "dtype": checkpoint["config"]["dtype"],
        "parameters": audit.parameters,
        "seconds": round(time.process_time() - start, 1),
        "laws": cost_by_law(audit),
        "unknown": len(audit.unknown),
    }


def cost_by_law(audit: Audit) -> list[Row]:
    """For every law and verdict: redundant dimensions, and what leaving them out saves."""
    alike: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in audit.findings:
        alike[finding.code, finding.law, finding.verdict].append(finding)
    return [
        {
            "code": code,
            "law": law,
            "verdict": verdict,
            "dof": sum(f.dof for f in findings),
            **vars(sum_payoffs(findings)),
        }
        for (code, law, verdict), findings in alike.items()
    ]


def main(
    names: Annotated[str, typer.Option(help="Only these checkpoints, separated by commas.")] = "",
    read: Annotated[bool, typer.Option("--read", help="Audit nothing.")] = False,
    file: Annotated[Path, typer.Option("--record", help="The record.")] = RECORD,
    page: Annotated[Path | None, typer.Option("--markdown", help="Write the page of docs/ here.")] = None,
) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = {row["name"]: row for row in load_record(file).get("rows", [])}
    wanted = names.split(",") if names else [c["name"] for c in load_checkpoints() if c["name"] not in rows]
    todo = [] if read else [c for c in load_checkpoints() if c["name"] in wanted]
    for checkpoint in track(todo, "auditing", console=Console(stderr=True), transient=True):
        rows[checkpoint["name"]] = cost_of(checkpoint)
        ordered = [rows[c["name"]] for c in load_checkpoints() if c["name"] in rows]
        save_record(file, {"versions": circumstances(), "rows": ordered})
    if page is not None:
        page.write_text(costs_page(load_record(file)), encoding="utf-8")
    print(json.dumps({"checkpoints": len(rows), "failed": sum("error" in row for row in rows.values())}))


if __name__ == "__main__":
    typer.run(main)
