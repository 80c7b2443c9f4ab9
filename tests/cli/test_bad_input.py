"""Mistaken and hostile input gives one clear line on standard error and exit status 2, and runs no code.

Odd but legal models are audited, or refused by such a line; none of them ends in a traceback.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import deadweight
from deadweight.cli import main
from deadweight.errors import DeadweightError
from deadweight.source.model import open_model

transformers.logging.set_verbosity_error()

TINY = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11, "n_positions": 5, "n_inner": 12}
Said = tuple[int, str, str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """The command in an empty folder, without a network: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["deadweight", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def refused(said: Said, *words: str) -> None:
    """Status 2, nothing on standard output, one printable line on standard error, with these words."""
    status, out, err = said
    assert status == 2, said
    assert "Traceback" not in out + err
    assert out == ""
    line = err.strip()
    assert line.startswith("error: ") and "\n" not in line and line.isprintable(), err
    for word in words:
        assert word in line, f"{word!r} is not in {line!r}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint."""
    torch.manual_seed(0)
    config = GPT2Config(**TINY, bos_token_id=0, eos_token_id=0, architectures=["GPT2LMHeadModel"])
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def config_file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    return str(file)


# --- the command line: paths and configs


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", ["does not exist"]),
        ("/no/such/folder/config.json", ["does not exist"]),
        ("nobody-there/nothing-either", ["hub id"]),
        ("model.bin", ["pickle", "safetensors"]),
        ("weights.pt", ["pickle"]),
        ("missing.gguf", ["does not exist"]),
        ("no_such_package.module:build", ["cannot be imported"]),
        ("json:no_such_callable", ["no_such_callable"]),
        ("json:__doc__", ["expected a callable"]),
        ("https://example.com/model", ["does not exist"]),
        ("..", ["config.json"]),
        ("\x1b[31mred\x1b[0m", []),
        ("", ["expected"]),
        (" ", []),
        ("a" * 5000, []),
        ("nul\0byte", []),
    ],
)
def test_a_missing_model_is_refused(run, model: str, words: list[str]) -> None:
    refused(run("audit", model), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["JSON"]),
        ("{", ["JSON"]),
        ("{}", ["model_type"]),
        ("[]", ["list"]),
        ("[1, 2]", ["list"]),
        ("null", ["NoneType"]),
        ('"gpt2"', ["str"]),
        ("3", ["int"]),
        ("NaN", ["float"]),
        ("[" * 100_000, ["JSON"]),
        ('{"model_type": "no_such_type"}', ["no_such_type"]),
        ('{"model_type": null}', ["model_type"]),
        ('{"model_type": ["gpt2"]}', ["model_type"]),
        ('{"model_type": {"a": 1}}', ["model_type"]),
        ('{"model_type": "\\u001b[31mred\\n\\u202e"}', ["model_type"]),
        ('{"model_type": "llama", "num_attention_heads": 0}', []),
        ('{"model_type": "llama", "num_attention_heads": "many"}', []),
        ('{"model_type": "gpt2", "n_embd": -8}', []),
        ('{"model_type": "gpt2", "n_embd": 7, "n_head": 2}', []),
        ('{"model_type": "gpt2", "n_embd": 1e308}', []),
        ('{"model_type": "gpt2", "vocab_size": null}', []),
        ('{"model_type": "gpt2", "activation_function": "__import__(\'os\').abort()"}', []),
        ('{"model_type": "gpt2", "n_embd": 100000000000000000000}', []),
        ('{"model_type": "gpt2", "n_layer": 1000000}', ["n_layer = 1,000,000", "0 to 10,000"]),
        ('{"model_type": "gpt2", "n_layer": -1}', ["n_layer = -1", "0 to 10,000"]),
        ('{"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}', ["trust-remote-code"]),
    ],
)
def test_a_config_that_is_no_config_is_refused(run, tmp_path: Path, text: str, words: list[str]) -> None:
    refused(run("audit", config_file(tmp_path, text)), *words)


def test_a_config_that_is_not_text_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    refused(run("audit", "config.json"), "config.json")


def test_a_config_that_is_a_folder_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refused(run("audit", "config.json"), "config.json")


def test_a_folder_whose_config_is_a_folder_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").mkdir(parents=True)
    refused(run("audit", "model"), "config.json")


def test_a_folder_without_a_config_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(run("audit", "empty"), "config.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_config_without_read_permission_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.json").chmod(0)
    refused(run("audit", "config.json"), "config.json")


def test_a_remote_module_beside_the_config_is_not_run(run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model", "AutoModelForCausalLM": "mine.Model"}
    config_file(tmp_path, json.dumps({"model_type": "mine", "auto_map": auto}))
    refused(run("audit", "."), "trust-remote-code")
    config_file(tmp_path, json.dumps({"model_type": "gpt2", "auto_map": auto, **TINY}))
    assert run("audit", ".")[0] == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["toys:build", "demo", "json:loads"])
def test_a_folder_that_is_named_like_something_else_is_a_folder(run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    refused(run("audit", name), "config.json")


# --- the command line: weights


def test_truncated_weights_are_refused(run, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    refused(run("audit", str(folder)), "model.safetensors", "truncated")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{not json here!!", b"\xff" * 7 + b"\x7f{}"])
def test_corrupt_weights_are_refused(run, folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(run("audit", str(folder)), "model.safetensors")


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "a/../../x.safetensors", "\x1b[2J"])
def test_an_index_that_names_files_elsewhere_is_refused(run, folder: Path, shard: str) -> None:
    index = {"weight_map": {"transformer.wte.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(run("audit", str(folder)))
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    refused(run("evaluate", str(folder)), "outside the folder" if "\x1b" not in shard else "missing")


def test_a_pickle_is_never_loaded(run, folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(tmp_path / "ran"), "w"))

    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    refused(run("audit", str(folder / "pytorch_model.bin")), "pickle")
    assert run("audit", str(folder))[0] == 0  # the config alone is enough
    refused(run("evaluate", str(folder)), "pickle")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"transformer.wte.weight": "model.pt"}}')
    refused(run("evaluate", str(folder)), "model.pt is damaged or truncated")
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_not_numbers_do_not_matter(run, folder: Path) -> None:
    """An audit speaks of all weights, so it never looks at these."""
    model = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.bias.fill_(float("nan"))
    model.save_pretrained(folder)
    status, out, _ = run("audit", str(folder), "--json", "-")
    assert status == 0
    assert "DW002" in {f["code"] for f in json.loads(out)["findings"]}


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> str:
    """The folder after a change to its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def test_random_weights_are_not_evaluated(run, folder: Path) -> None:
    bare = rewritten(folder, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"))
    refused(run("evaluate", bare), "no transformer.h.1.mlp.c_fc.weight", "complete checkpoint")
    with pytest.raises(DeadweightError, match="complete checkpoint"):
        deadweight.load(folder)


def test_a_shape_that_the_config_does_not_have_is_named(run, folder: Path) -> None:
    odd = rewritten(folder, lambda tensors: tensors.update({"transformer.wpe.weight": torch.ones(3, 8)}))
    refused(run("evaluate", odd), "transformer.wpe.weight has shape [3, 8] in the checkpoint; expected [5, 8]")


def test_tensors_that_the_model_does_not_read_are_named(folder: Path) -> None:
    odd = rewritten(folder, lambda tensors: tensors.update(spare=torch.ones(3)))
    assert "1 tensors of the checkpoint are not read" in " ".join(open_model(odd, weights=True).notes)


def test_a_model_whose_own_code_fails_is_refused_in_one_line(run, tmp_path: Path) -> None:
    """LLaMA of transformers cannot run with `return_dict: false`."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=32)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"return_dict": False}))
    (tmp_path / "text.txt").write_text("some text " * 50)
    refused(run("evaluate", "llama", "--text", "text.txt"), "llama does not run (AttributeError", "last_hidden_state")
    options = ("--bits", "8", "--text", "text.txt", "--length", "32", "--windows", "4")
    refused(run("compress", "llama", "out", *options), "llama does not run (AttributeError")
    refused(run("verify", "llama", "llama"), "llama cannot be traced")


def test_a_config_alone_is_not_evaluated(run, folder: Path) -> None:
    refused(run("evaluate", str(folder / "config.json")), "config without weights; expected the folder")


def test_a_link_to_nothing_is_no_hub_id(run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    refused(run("audit", "link"), "is a link to nothing")


def test_a_command_for_checkpoints_says_that_it_takes_no_code(run) -> None:
    refused(run("evaluate", "mypkg.model:build"), "is code, which this command does not take; expected a Hugging Face")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("2x4", ["does not run", "Long, Int"]),
        ("x=2x4:int", ["does not run", "input_ids"]),
        ("2x6:int", ["length 6; expected at most 5"]),
    ],
)
def test_inputs_that_a_model_without_weights_does_not_take_are_refused(
    run, folder: Path, inputs: str, words: list[str]
) -> None:
    refused(run("audit", str(folder / "config.json"), "--inputs", inputs), *words)


# --- the command line: options and factories


@pytest.mark.parametrize(
    "options",
    [
        ["--select", "DW02"],
        ["--select", "key-bais"],
        ["--ignore", "DW999"],
        ["--select", ",,"],
        ["--select", "\x1b[31m"],
        ["--json", "no/such/folder/report.json"],
        ["--json", "."],
        ["--html", "-"],
        ["--json", "-", "--output-format", "sarif"],
        ["--select", "key-bias", "--ignore", "DW002"],
        ["--baseline", "no/such/folder/known.json", "--update-baseline"],
    ],
)
def test_options_without_a_meaning_are_refused(run, options: list[str]) -> None:
    refused(run("audit", "demo", *options))


@pytest.mark.parametrize(
    "arguments", [["audit"], ["audit", "demo", "--length", "0"], ["audit", "demo", "--output", "x"], ["audti"]]
)
def test_wrong_usage_is_refused(run, arguments: list[str]) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["compress", "demo", "OUT", "--plot", "x.gif"],
        ["saturation", "demo", "--plot", "x.gif"],
        ["sweep", "nowhere.toml", "OUT"],
    ],
)
def test_a_file_that_cannot_be_written_or_read_is_refused_before_the_work(run, arguments: list[str]) -> None:
    refused(run(*arguments))
    assert not Path("OUT").exists()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 8 TB")])
def test_too_little_memory_is_one_line(run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("deadweight.cli.explain.make_console", fail)
    refused(run("explain"), "not enough memory")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_a_closed_output_is_none() -> None:
    command = f"{sys.executable} -m deadweight explain"
    full = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True, check=False)
    assert full.returncode == 2 and full.stderr.startswith("error: ") and full.stderr.count("\n") == 1
    closed = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True, check=False)
    assert closed.returncode == 0 and closed.stderr == ""


def test_a_length_beyond_the_context_is_refused(run) -> None:
    refused(run("audit", "demo", "--length", "100000"), "length 100000", "positions")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise RuntimeError('no\\x1b[31m\\ndisk')", ["RuntimeError", "disk"]),
        ("raise SystemExit(0)", ["SystemExit"]),
        ("return 42", ["int"]),
        ("return nn.Linear", ["type"]),
        ("return nn.Linear(4, 2), 1, 2", ["tuple of 3"]),
        ("return nn.Bilinear(4, 3, 2)", ["without example inputs", "--inputs 2x64:int"]),
        ("return nn.Linear(4, 2), torch.randn(3, 7)", []),
        ("return nn.Linear(4, 2), {'nope': torch.randn(3, 4)}", []),
        ("return nn.Linear(4, 2), 'hello'", []),
        ("return nn.Linear(4, 2), object()", []),
        ("return nn.ReLU(), torch.randn(3, 4)", ["no parameters"]),
        ("return nn.LazyLinear(4), torch.randn(3, 4)", ["lazy"]),
        ("return nn.ModuleDict({'a': nn.Linear(4, 4)}), torch.randn(3, 4)", []),
    ],
)
def test_a_factory_that_returns_no_model_is_refused(run, tmp_path: Path, body: str, words: list[str]) -> None:
    name = f"factory_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n\n\ndef build():\n    {body}\n")
    refused(run("audit", f"{name}:build"), *words)


def test_what_a_factory_prints_does_not_disturb_the_result(run, tmp_path: Path) -> None:
    body = "print('hello')\n    return nn.Linear(4, 2), torch.randn(3, 4)"
    (tmp_path / "talks.py").write_text(f"import torch\nfrom torch import nn\n\n\ndef build():\n    {body}\n")
    status, out, err = run("audit", "talks:build", "--json", "-")
    assert status == 0 and json.loads(out)["model"] == "talks:build" and "hello" in err


# --- odd live models


class Block(nn.Module):
    """A linear map before a LayerNorm, whose bias has one dead direction; subclasses do odd things with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.linear(x))


class IntegerParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) + self.shift


class ComplexParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) + self.phase.real)


class EmptyParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) + self.nothing.sum()


class ChosenIndex(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


class NestedOutput(Block):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": super().forward(x), "b": [None, 3, {"c": x}]}


class NoOutput(Block):
    def forward(self, x: Tensor) -> None:
        super().forward(x)


@dataclass
class Pair:
    a: Any
    b: Any


class DataclassOutput(Block):
    def forward(self, x: Tensor) -> Pair:
        return Pair(super().forward(x), Pair(x, 1))


class OwnInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.add_(1).mul_(2)
        y += x
        return self.norm(y)


class InPlaceOnInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


class BranchOnData(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else self.linear(x)


class ShapeFromData(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0])


class EscapingName(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("a\x1b[31mred\nnew", nn.Parameter(torch.randn(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) + self._parameters["a\x1b[31mred\nnew"])


def shared() -> nn.Module:
    linear = nn.Linear(4, 4)
    return nn.Sequential(linear, nn.ReLU(), linear, nn.LayerNorm(4))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Block()


X = torch.randn(2, 4)
ODD: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "integer parameter": lambda: (IntegerParameter(), X),
    "complex parameter": lambda: (ComplexParameter(), X),
    "empty parameter": lambda: (EmptyParameter(), X),
    "no float output": lambda: (ChosenIndex(), X),
    "nested output": lambda: (NestedOutput(), X),
    "no output": lambda: (NoOutput(), X),
    "dataclass output": lambda: (DataclassOutput(), X),
    "output is the input": lambda: (OwnInput(), X),
    "in place": lambda: (InPlace(), X),
    "in place on its input": lambda: (InPlaceOnInput(), X.clone()),
    "branch on data": lambda: (BranchOnData(), X),
    "shape from data": lambda: (ShapeFromData(), torch.tensor([[1.0, 2, 3, 4], [-1, 2, 3, 4]])),
    "escapes in a name": lambda: (EscapingName(), X),
    "shared modules": lambda: (shared(), X),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), X),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), X),
    "empty batch": lambda: (Block(), X[:0]),
    "lstm": lambda: (nn.LSTM(4, 4), torch.randn(3, 2, 4)),
    "gru": lambda: (nn.GRU(4, 4, bidirectional=True), torch.randn(3, 2, 4)),
    "batch norm": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(5, 4)),
    "buffers only": lambda: (nn.BatchNorm1d(4, affine=False), X),
    "bfloat16": lambda: (Block().bfloat16(), X.bfloat16()),
    "bfloat16 with float32 inputs": lambda: (Block().bfloat16(), X),
    "float16": lambda: (Block().half(), X.half()),
    "meta": lambda: (on_meta(), X),
    "meta inputs": lambda: (Block(), X.to("meta")),
    "lazy": lambda: (nn.LazyLinear(4), X),
    "compiled": lambda: (torch.compile(Block()), X),
    "data parallel": lambda: (nn.DataParallel(Block()), X),
    "frozen": lambda: (Block().requires_grad_(False), X),
    "sparse gradients": lambda: (nn.EmbeddingBag(7, 4, sparse=True), torch.randint(0, 7, (2, 3))),
    "one position": lambda: (nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), torch.randn(1, 1, 8)),
    "unbatched convolution": lambda: (nn.Sequential(nn.Conv1d(8, 6, 1), nn.Softmax(0)), torch.randn(8, 5)),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_is_audited_or_refused_in_one_line(name: str, training: bool, capfd) -> None:
    module, inputs = ODD[name]()
    try:
        result = deadweight.audit(module, inputs, training=training)
    except DeadweightError as error:
        assert str(error).isprintable()
    else:
        assert result.parameters > 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["integer parameter", "empty parameter", "no float output", "output is the input"])
def test_an_odd_model_can_be_accounted_for_or_is_refused(name: str) -> None:
    module, inputs = ODD[name]()
    try:
        result = deadweight.audit(module, inputs, complete=True)
    except DeadweightError as error:
        assert str(error).isprintable()
    else:
        assert result.completeness is not None and not result.completeness.unsound


def test_the_users_module_and_inputs_are_left_as_they_were() -> None:
    module, inputs = InPlaceOnInput().train(), X.clone()
    before = {name: p.clone() for name, p in module.named_parameters()}
    deadweight.audit(module, inputs)
    assert module.training
    assert torch.equal(inputs, X)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in module.named_parameters())


def test_at_one_position_a_query_bias_is_not_called_dead() -> None:
    """With a single key every logit cancels; that says nothing about the model at any other length."""
    module, inputs = ODD["one position"]()
    claimed = [f for f in deadweight.audit(module, inputs).findings if f.code == "DW002"]
    pieces = [piece for f in claimed for piece in f.slice or ((0, 24),)]
    assert all(start >= 8 and stop <= 16 for start, stop in pieces), pieces


ESCAPING = r"""
import torch
from torch import nn

NAME = "x\x1b[31m\n"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_parameter(NAME, nn.Parameter(torch.randn(4)))

    def forward(self, x):
        return self.norm(self.linear(x) + self._parameters[NAME])


def build():
    return Model(), torch.randn(2, 4)
"""


def test_names_with_escapes_do_not_reach_the_terminal(run, tmp_path: Path) -> None:
    (tmp_path / "escaping.py").write_text(ESCAPING)
    status, out, err = run("audit", "escaping:build", "--proofs")
    assert status == 0
    assert "\x1b[31m" not in out + err
    assert "DW017" in out
