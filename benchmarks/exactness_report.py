"""The exactness benchmark's rows, what they say, and the page that shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

FLOORS = 3.0  # more than so many noise floors is more than rounding
EXACT = 1e-10  # in float64
MIB = 1 << 20


@dataclass(frozen=True)
class Loading:
    """One attempt of transformers to load a result."""

    trusted: bool  # with trust_remote_code
    missing: int = 0  # keys that it had to make up
    unexpected: int = 0  # keys that it did not know
    error: float | None = None  # of what it then computes in float32
    problem: str = ""

    def words(self, own: float, floor: float) -> str:
        how = "with trust_remote_code" if self.trusted else "yes"
        if self.error is None:
            return f"no ({self.problem})"
        keys = f", {self.missing} keys missing" if self.missing else ""
        if self.error <= max(1.5 * own, FLOORS * floor):
            return how + keys
        return f"loads another function (error {self.error:.1g}{keys})"


@dataclass(frozen=True)
class Row:
    """The result of one tool on one model."""

    tool: str
    model: str
    status: str  # done, not supported, failed, not run
    why: str = ""
    logits: dict[str, float] = field(default_factory=dict)  # relative error by precision
    probabilities: dict[str, float] = field(default_factory=dict)  # the same, of log-probabilities
    floor: float = 0.0  # the original in float32
    probability_floor: float = 0.0  # its log-probabilities
    control: dict[str, float] = field(default_factory=dict)  # the original as that environment computes it
    before: int = 0  # floating numbers in the file
    after: int = 0
    loadings: tuple[Loading, ...] = ()  # of the result, by plain transformers
    folder: bool = False  # the result is a Hugging Face folder
    verified: str = ""  # what deadweight verify says of the two folders
    seconds: float = 0.0  # of the tool's own work
    process_seconds: float = 0.0
    peak_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def keeps(self) -> str:
        """The strongest output that is the same function, by float64 if that is known, else within the noise floor."""
        if same(self.logits, self.floor):
            return "logits" if self.probabilities else "output"
        return "probabilities" if same(self.probabilities, self.probability_floor) else "nothing"

    @property
    def plain(self) -> str:
        if not self.folder:
            return "no such folder is written"
        own = self.logits["float32"]
        return "; ".join(dict.fromkeys(a.words(own, self.floor) for a in self.loadings))


def same(errors: dict[str, float], floor: float) -> bool:
    return errors.get("float64", 1.0) <= EXACT or errors.get("float32", 1.0) <= FLOORS * floor


def from_json(data: dict[str, Any]) -> Row:
    known = {k: v for k, v in data.items() if k not in ("keeps", "plain")}
    return Row(**known | {"notes": tuple(data["notes"]), "loadings": tuple(Loading(**a) for a in data["loadings"])})


def markdown(rows: list[Row], setting: dict[str, Any]) -> str:
    lines = ["# Exactness, side by side", "", INTRODUCTION, "", *kept(rows), "", *preface(setting)]
    for model in dict.fromkeys(r.model for r in rows):
        mine = [r for r in rows if r.model == model]
        lines += ["", f"## {model}", "", *table([r for r in mine if r.status == "done"])]
        lines += [f"- {r.tool}: {r.status} ({r.why})" for r in mine if r.status != "done"]
    return "\n".join(lines) + "\n"


CLAIMS = {  # what it says of itself, and how it was used
    "deadweight": (
        "the same function over the real numbers; removed numbers are not in the file (slim), or are zero or one "
        "(stock)",
        "`reduce(MODEL, OUT)`; and `layout='stock'`",
    ),
    "TransformerLens": (
        "folds norms and value biases, centres the weights that write to the stream; centring the unembedding "
        "changes logits, not log-probabilities",
        "`enable_compatibility_mode()`; and `center_unembed=False`",
    ),
    "transformer-tricks": (
        '"mathematically equivalent" for Llama, Mistral, Gemma, Qwen and others with RMSNorm; strict removes the gains '
        "from the file, and needs modeling code that works without them",
        "`flashify_repo(MODEL, dir=OUT)`; and `strict=True`",
    ),
    "llmcompressor": (
        "norms fused: moves a norm's scale into the linear layers behind it. SpinQuant: rotations fused into the "
        "weights, so that a later quantisation loses less",
        "`fuse_norm_linears`; `SpinQuantModifier(rotations=['R1', 'R2'])`",
    ),
    "torch": ("a convolution and its BatchNorm become one convolution, in eval", "`fuse_conv_bn_eval`"),
}
INTRODUCTION = (
    "This page compares `deadweight reduce` with other tools that fold or remove weights: is the function the same?"
)
PREFACE = """\
Weights are random, with gains other than one and biases other than zero; only the demo and MiniLM are trained. The
sizes of errors are those of these weights. If a tool failed, its own error message is quoted. llmcompressor finds the
readers of a norm by LLaMA's module names. For models with other names it was given the mapping; this is noted, and goes
beyond its documentation.

Why some tools keep nothing. Gemma's norms multiply by one plus their weight, so folding the weight alone changes the
function. LayerNorm's shift must be folded together with its gain. SpinQuant centres the embeddings; RMSNorm, unlike
LayerNorm, depends on the mean that this removes, and the row *not centred* leaves that step out. A centred unembedding
adds the same number to all logits of a position, so it keeps probabilities.

- **keeps**: the strongest output that is the same function: *logits*; only *probabilities*, after the softmax; or
  *nothing*. The criterion is a float64 error of at most 1e-10, or a float32 error within 3 noise floors.
- **float32, float64**: relative error of the logits (for an encoder: of the last hidden state) against the original in
  float64, with the tool working in that precision. In float64 nothing in the forward pass is rounded to float32, so
  tools that always merge weights in float32 show it here. **log-probabilities**: their relative error, in float64 if it
  ran.
- **floors**: the float32 error divided by that of the original.
- **numbers removed**: floating-point numbers in the original's file minus those in the result's. A number that was set
  to zero or one is still there; a file that grew has a negative count.
- **plain transformers**: whether transformers alone loads the result, and whether that is the function the tool made.
- **verify**: `deadweight verify ORIGINAL RESULT`, a second computation, with its largest float64 error. Both are stored
  in float32 there, so it includes the rounding of the new weights.
- **seconds**: from the original's files to the result's files (for TransformerLens, which writes none, to its model),
  and the whole process with its imports. deadweight's time includes its proofs and its check of the result; no other
  tool checks. **MiB**: peak of that process, imports included."""


def preface(setting: dict[str, Any]) -> list[str]:
    lines = [
        f"Written by `benchmarks/exactness.py` in one run, {setting['jobs']} tool at a time, on {setting['cores']} "
        "shared CPU cores, so seconds are only a coarse measure." + setting.get("note", ""),
        "",
    ]
    for tool, versions in setting["versions"].items():
        lines.append(f"- {tool}: {', '.join(f'{n} {v}' for n, v in versions.items())}")
    return [*lines, "", *claims(), "", *PREFACE.splitlines()]


def kept(rows: list[Row]) -> list[str]:
    """The verdict: for each tool, in how many of the models that it supports the function stayed the same."""
    lines = [
        line(("tool", "models", "logits or output kept", "only probabilities", "nothing")),
        line("---" for _ in range(5)),
    ]
    for tool in dict.fromkeys(r.tool for r in rows):
        keeps = [r.keeps for r in rows if r.tool == tool and r.status == "done"]
        same_function = sum(k in ("logits", "output") for k in keeps)
        cells = (tool, len(keeps), same_function, keeps.count("probabilities"), keeps.count("nothing"))
        lines.append(line(map(str, cells)))
    return lines


def claims() -> list[str]:
    rows = [line((tool, says, used)) for tool, (says, used) in CLAIMS.items()]
    return [line(("tool", "what it promises", "used as")), line("---" for _ in range(3)), *rows]


HEADS = (
    "tool",
    "keeps",
    "float32",
    "floors",
    "float64",
    "log-probabilities",
    "numbers removed",
    "plain transformers",
    "verify",
    "seconds",
    "MiB",
)


def table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    head = [
        f"Noise floor {rows[0].floor:.1e}; {rows[0].before:,} numbers.",
        "",
        line(HEADS),
        line("---" for _ in HEADS),
    ]
    return [
        *head,
        *(line(cells(r)) for r in rows),
        "",
        *(f"- {r.tool}: {n}" for r in rows for n in r.notes if "skipped" not in n),
    ]


def cells(r: Row) -> tuple[str, ...]:
    chances = r.probabilities.get("float64", r.probabilities.get("float32"))
    gone = r.before - r.after
    return (
        r.tool,
        r.keeps,
        f"{r.logits['float32']:.1e}",
        f"{r.logits['float32'] / r.floor:.2g}",
        f"{r.logits['float64']:.1e}" if "float64" in r.logits else "does not run",
        "" if chances is None else f"{chances:.1e}",
        f"{gone:,} ({gone / max(r.before, 1):.2%})",
        r.plain,
        r.verified,
        f"{r.seconds:.1f} / {r.process_seconds:.0f}",
        f"{r.peak_bytes / MIB:.0f}",
    )


def line(parts: Iterable[str]) -> str:
    return "| " + " | ".join(parts) + " |"
