"""Is everything redundant explained, in every causal type that transformers registers? Explained over measured.

nice -n 10 python benchmarks/accounts.py --json benchmarks/results/accounts.json --code COMMIT
python benchmarks/accounts.py --types llama,gpt2 --json FILE --again
python benchmarks/accounts.py --read benchmarks/results/accounts.json --markdown docs/accounts.md

The default config of each type is opened as benchmarks/coverage.py does, a narrow clone is made of it, and the account
of that clone is taken: measured is the nullity of the Jacobian, explained the rank of what the laws claim. Every type
runs in a process of its own, with a limit of processor time. Types already in the JSON file are kept: a stopped run
goes on.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from own_process import in_own_process

from deadweight.report import record


@dataclass(frozen=True)
class Row:
    """The account of one model type."""

    type: str
    parameters: int = 0
    measured: int = 0
    explained: int = 0
    unsound: tuple[str, ...] = ()
    decided: bool = True
    by_law: tuple[tuple[str, int], ...] = ()
    clone: str = ""
    moved: tuple[str, ...] = ()  # the parameters that unexplained directions move most
    unread: int = 0  # of the unexplained dimensions, those in rows of tables that no drawn input reads
    seconds: float = 0.0  # of processor time
    error: str = ""
    code: str = ""

    @property
    def complete(self) -> bool:
        return not self.error and self.decided and not self.unsound and self.measured == self.explained + self.unread


CONSTANT_OF_VALUES = (
    "2, one for each layer. Values may gain a constant u with W_O·u a multiple of the ones vector, which LayerNorm "
    "ignores. The direction depends on the weights (u = W_O⁻¹·1)."
)
NOTHING_ROTATES = (
    "2: a quarter of the head is rotary, and of the clone's heads of size 4 that is nothing: in the layer with full "
    "attention all frequencies are 0, so that single elements of the two gains may trade scales. The proof sees pairs."
)
MUSICGEN = (
    "28 lie in rows of tables that no drawn input reads. 3: positions are fixed vectors, and five of them leave three "
    "rotations of the stream that keep their differences; with longer inputs none is left. 2, one for each layer: "
    "values may gain a constant u with W_O·u a multiple of the ones vector, which LayerNorm ignores."
)
TABLE_OF_EACH_LAYER = (
    "68: what the projection and its norm add to the second table of words is a function of the word alone, so the "
    "table can take over any change of their 64 + 4 parameters. 8: each channel of each layer trades scale between "
    "that table and what reads it. No law moves a function of the words into a table. 2: of a head of size 4 nothing "
    "is rotary in the layer with full attention, so that single elements of the two gains may trade scales."
)
TABLE_ROWS = "56 lie in rows of tables that no drawn input reads. The rest is that of gemma4_text. "
REASONS = {
    "fuyu": "60, as in persimmon. 7 lie in a row of the table of words that no drawn input reads.",
    "gemma4": TABLE_ROWS + TABLE_OF_EACH_LAYER,
    "gemma4_text": TABLE_OF_EACH_LAYER,
    "hy_v4": "The row is older than two rules. 192: the mixing weights of the first hyper-connection read four equal "
    "copies of the embedding (DW017 claims it now). 28: rotations of the stream, where a norm is written as a factor "
    "behind a linear map (now a rule). 72: scales of the experts' units behind a clamp that no drawn input reaches, as "
    "in gpt_oss. The count is not certain: the first mixing of copies is dead up to a norm's ε.",
    "jamba": "1: the gain of what reads the state, the skip D and the output projection share one scale, as in mamba.",
    "jetmoe": "Its code splits the words by expert, so the graph is that of one path. 72: each hidden unit of each "
    "expert trades scale between its rows and its column; the proof does not follow the rows of one expert through a "
    "concatenation of all of them. 5 move queries of the experts, keys and the gain before them.",
    "musicgen": MUSICGEN,
    "musicgen_melody": MUSICGEN,
    "phimoe": "36, all in the routers. Scores that are more than 2 % below the largest are masked before the softmax. "
    "Where one score is left its weight is 1 whatever the router says; few of the drawn inputs leave two.",
    "prophetnet": "For each layer 40 in the map from the stream to scores of relative positions: 18 of a bucket that "
    "no input of five words reaches, 18 because the same number for all buckets of a head is dead in the softmax (no "
    "law groups the rows of a map so), 4 the direction that LayerNorm lost. 7: row 0 of the positions is never read, "
    "less its mean.",
    "reformer": "8: keys of the local layer may gain a constant. 12: queries and keys of the other layer are one "
    "vector, of which one is normed: each head has its rotations. 6: rotations of the stream that keep the halves of "
    "the two position tables apart. 2: values may gain a constant u with W_O·u a multiple of the ones vector, if both "
    "streams gain the same multiple. No law follows its sorted chunks.",
    "roc_bert": "144 lie in the tables of shapes and pronunciations: without such ids, all words read their row 0. 16 "
    "move the table of words, its map and the last norm, and were not looked into.",
    "rwkv": "15: a norm alone reads the table, and its results are read by norms alone. With ε > 0 the rows can be "
    "chosen so that they undo any change of the norm's 8 gains and 8 shifts, less one that is explained (see minimax).",
    "xlm": "65: its code sets padded positions to zero after every layer and in the output, so that nothing at a "
    "padded position matters; the proof sees a shift that holds at some positions only. For each layer 24 directions "
    "that LayerNorm lost (queries, keys, values) and 8 shifts of the norm; 1 scale of the table.",
    "bigbird_pegasus": CONSTANT_OF_VALUES,
    "blenderbot-small": "1: positions are added to a normed embedding, so x may gain 1·(w·p) for the position's vector "
    "p, with w = 1/γ of that norm. LayerNorm ignores it, and Q, K and V of the first layer undo it. As in rembert.",
    "gemma4_unified": NOTHING_ROTATES,
    "gemma4_unified_text": NOTHING_ROTATES,
    "gpt_neox_japanese": "1, in the first layer, whose attention has no bias. " + CONSTANT_OF_VALUES.partition(". ")[2],
    "hunyuan_v1_moe": "16: the default config has one expert, and softmax over one number is 1 whatever the router "
    "says. A softmax over one number is most often an example that is too short, so the proof is silent.",
    "minimax": "8: a norm alone reads the table. With ε > 0 its rows can be chosen so that the normed vectors take one "
    "factor for each channel, which the norm's gain undoes. As in nanochat, for eight channels in place of one.",
    "persimmon": "Queries and keys have a LayerNorm for each head. In the weight before it the mean of a head's rows "
    "is dead for every column: no law divides a weight so (56). 4 are elements of the key norms' shifts that are not "
    "rotary.",
    "recurrent_gemma": "16: a channel of the recurrence may be scaled by the convolution before it, if both gates and "
    "the output projection undo it. No law follows a scale through the gated recurrence.",
    "roformer": "4: its table of sines and cosines is stored as a parameter, for two rotary pairs. Each pair may turn "
    "by one angle at all positions, and may be scaled if queries undo it. No law moves the rotary table itself.",
    "stablelm": CONSTANT_OF_VALUES,
    "bitnet": "24: a gate of squared ReLU units times an up projection, then a norm over all units. Row j of the gate "
    "may grow by s if row j of the up projection shrinks by s². No law trades scales between the two factors of one "
    "product; what reads the product cannot take the scale, because the norm stands between.",
    "cohere2_moe": "Attention and experts run in parallel, so the experts of the first layer read single words: each "
    "word is one point, and 97 words are too few for three experts of 288 numbers. With 300 words 498 are measured and "
    "492 explained (110 s of processor time); the other 6 lie in the table of words.",
    "cpmant": "72 lie in rows of tables that no drawn input reads. 8: the prompt has segment 0 and every word but id 0 "
    "has segment 2, so each segment's vector can move into the rows of its own words. The law of added tables moves "
    "one vector for all words.",
    "dbrx": "Its code loops over the experts that were chosen, so the graph is that of one path: the number of words "
    "for each expert is fixed. Few other inputs take this path; the count sees too few inputs to be certain.",
    "diffllama": "For each layer: 15, because λ = exp(q₁·k₁) − exp(q₂·k₂) + c is one number made of 16 parameters (its "
    "level set is no group that is independent of the weights); and 16, because both halves of the values are weighed "
    "by the same scores, which two calls compute: the proof sees two, and claims rotations of each half.",
    "mamba": "2, one for each layer: what reads the state, the skip D and the output projection share one scale. "
    "No law scales a sum of a scan and a skip.",
    "nanochat": "1: with ε > 0 the rows of the table can be chosen so that all normed vectors shrink by one factor, "
    "which the learned factors of the first layer undo. DW014 up to ε/|row|².",
    "nemotron": CONSTANT_OF_VALUES,
    "openai-gpt": "16: key biases. Masked scores are multiplied by 0 and set to −10,000, so a key bias shifts the "
    "other scores against them. Softmax gives these keys a weight of exp(−10,000), which is 0 in float64 and not over "
    "the real numbers: the law is exact, and silent.",
    "xglm": "16: key biases. Scores pass torch.max(scores, lowest number), and no rule says that this keeps a shift.",
    "gpt_oss": "72: a unit is gate·(1 + clamp(up, ±7)). The drawn inputs do not reach the clamp, and without it the "
    "bias of up could take a scale of 1 + up over. The proof sees the clamp, and is silent.",
    "xlnet": "The row is older than the rules for weights with an axis of heads. With the first of them, which follow "
    "its values, 228 were explained; bases of queries, keys and positions came later and were not counted.",
    "rembert": "31: the embedding projection writes an affine space of one dimension less than the stream, because "
    "LayerNorm comes before it. Q, K and V of the first layer may change where nothing is written (24 = 3 × 8 rows); "
    "and x may gain 1·(w·x), which LayerNorm ignores and Q, K and V undo (7).",
}


def counted(model_type: str) -> dict[str, Any]:
    """The account of one type's narrow clone: fields of a row."""
    from coverage import opened

    from deadweight.audit.best_account import best_account
    from deadweight.audit.clone_measurements import another_clone, clone_of, refuse_large_account
    from deadweight.laws.catalogue import every_law

    _, source = opened("causal", model_type)
    clone = clone_of(source, None, every_law())
    refuse_large_account(clone)
    account = best_account(clone, partial(another_clone, source, None, every_law()), widen=True)
    count = account.completeness
    names = clone.graph.parameters
    return {
        "parameters": count.parameters,
        "measured": count.measured,
        "explained": count.explained,
        "unsound": [f"{claim.code} {names[claim.node]}: {error:.1e}" for claim, error in account.unsound],
        "decided": account.decided,
        "by_law": count.by_law,
        "clone": count.clone,
        "unread": account.unread,
        "moved": [names[n] for n, _ in account.shortfall if n in names][:6] if count.measured > count.explained else [],
    }


def measure(model_type: str, seconds: int, code: str) -> Row:
    """One type in a process of its own."""
    facts = in_own_process(counted, model_type, seconds)
    facts.pop("ours", None)
    return Row(**(facts | {"type": model_type, "code": code}))


def markdown(rows: list[Row], setting: dict[str, Any]) -> str:
    """The page: all counts, and what is not explained."""
    made = [r for r in rows if not r.error]
    whole = [r for r in made if r.complete]
    lines = [
        "# Accounts: is every redundant dimension explained, in every causal type?",
        "",
        "This page says for which causal types of transformers the laws explain every redundant dimension.",
        "",
        f"**{len(whole)} of the {len(made)} types counted so far are complete; the count contradicts a claim in "
        f"{sum(bool(r.unsound) for r in made) or 'none'} of them.** transformers has {setting['types']} causal types.",
        "",
        "Each type was counted on the narrow clone of its default config, in float64 with random parameters, with "
        f"{setting['seconds']} s of processor time. *Measured* is the nullity of the Jacobian of the outputs; "
        f"*explained* is the rank of the directions that the laws claim. torch {setting['torch']}, transformers "
        f"{setting['transformers']}. Written by `benchmarks/accounts.py`.",
        *setting.get("notes", ()),
        "",
    ]
    lines += [
        "## Complete",
        "",
        "*Not read*: dimensions of table rows that no drawn input reads, and that no law explains. They have no effect "
        "on the inputs drawn, which does not say that they are redundant.",
        "",
        "| type | parameters | measured | explained | not read |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {r.type} | {r.parameters} | {r.measured} | {r.explained} | {r.unread or ''} |" for r in whole]
    lines += [
        "",
        "## Not complete",
        "",
        "| type | parameters | measured | explained | why, or the parameters that unexplained directions move |",
    ]
    lines += ["| --- | --- | --- | --- | --- |"]
    for r in made:
        if not r.complete:
            words = "; ".join([*r.unsound, *([] if r.decided else ["the count is not certain"]), ", ".join(r.moved)])
            words = f"{REASONS[r.type]} " if r.type in REASONS else words
            lines.append(f"| {r.type} | {r.parameters} | {r.measured} | **{r.explained}** | {words} |")
    lines += ["", "## Not counted", "", "| types | why |", "| --- | --- |"] if len(made) < len(rows) else []
    reasons: dict[str, list[str]] = {}
    for r in rows:
        if r.error:
            reasons.setdefault(r.error.replace("|", "/"), []).append(r.type)
    lines += [f"| {', '.join(types)} | {why} |" for why, types in sorted(reasons.items(), key=lambda x: -len(x[1]))]
    states = Counter(r.code for r in rows if r.code)
    lines += ["", "Rows: " + ", ".join(f"{n} of commit {code}" for code, n in states.most_common()) + "."]
    return "\n".join(lines) + "\n"


def main(
    types: Annotated[str, typer.Option(help="Only these types, separated by commas.")] = "",
    seconds: Annotated[int, typer.Option(help="Limit of processor time per type, in seconds.")] = 60,
    again: Annotated[bool, typer.Option(help="Count these types again, even if the record has them.")] = False,
    short: Annotated[bool, typer.Option(help="Count again the types of the record that are not complete.")] = False,
    code: Annotated[str, typer.Option(help="The commit, for the record.")] = "",
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
) -> None:
    import torch
    import transformers
    from transformers.models.auto import modeling_auto as auto

    setting: dict[str, Any] = {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "seconds": seconds,
        "types": len(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    }
    file, rows = recorded or json_file, dict[str, Row]()
    if file is not None and file.exists():
        setting, known = record.read_rows(file)
        rows = {r["type"]: Row(**r) for r in known}
    wanted = types.split(",") if types else list(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for model_type in wanted if recorded is None else ():
        old = rows.get(model_type)
        if old is not None and not again and not (short and not old.complete):
            continue
        rows[model_type] = row = measure(model_type, seconds, code)
        print(f"{model_type}: {row.explained} / {row.measured} {row.error} {row.seconds} s", flush=True)
        record.write_rows(json_file, setting, [rows[t] for t in sorted(rows)])
    if page is not None:
        page.write_text(markdown([replace(rows[t], by_law=()) for t in sorted(rows)], setting), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    typer.run(main)
