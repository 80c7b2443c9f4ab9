"""The five reference models: every redundant dimension is counted, explained and reported, to the last one.

Width 8, 2 heads, 2 layers, vocabulary 11, context 5, hidden 12, random parameters, float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import deadweight

EPSILON = 1e-10  # a norm's ε below this cannot be told from 0 in the account


def gpt2(*, tied: bool) -> nn.Module:
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11, "n_positions": 5, "n_inner": 12}
    return GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 5, "type_vocab_size": 1}
    return BertModel(BertConfig(**sizes, layer_norm_eps=1e-12), add_pooling_layer=False)


def llama(*, groups: int) -> nn.Module:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 5, "num_key_value_heads": groups}
    return LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=0.0, tie_word_embeddings=False))


MODELS = {
    "GPT-2, tied": (lambda: gpt2(tied=True), 1208, 345),
    "GPT-2, untied": (lambda: gpt2(tied=False), 1296, 400),
    "BERT": (bert, 1216, 344),
    "LLaMA": (lambda: llama(groups=2), 1304, 173),
    "LLaMA, one key-value head": (lambda: llama(groups=1), 1176, 133),
}


@pytest.mark.parametrize(("build", "parameters", "redundant"), MODELS.values(), ids=list(MODELS))
def test_the_account_closes(build: Callable[[], nn.Module], parameters: int, redundant: int) -> None:
    torch.manual_seed(0)
    result = deadweight.audit(build(), complete=True)
    assert result.parameters == parameters
    account = result.completeness
    assert account is not None and account.unsound == 0
    assert account.measured == account.explained == redundant
    assert sum(f.dof for f in result.findings if counts(f)) == redundant
    assert sum(n for _, n in account.by_law) == redundant


def encoder(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "relu", batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(("norm_first", "redundant"), [(True, 323), (False, 300)])
def test_units_that_are_seldom_on_are_not_counted_as_redundant(norm_first: bool, redundant: int) -> None:
    """With biases as large as the rest of their sum, some ReLU units are off for almost all inputs."""
    torch.manual_seed(0)
    account = deadweight.audit(encoder(norm_first=norm_first), torch.randn(1, 5, 8), complete=True).completeness
    assert account is not None and account.measured == account.explained == redundant


def counts(finding: deadweight.Finding) -> bool:
    """Claims up to a norm's ε count where ε is too small to be seen; the note says which it is."""
    if finding.tier != "epsilon":
        return True
    return float(finding.note.split("ε of ")[1].split()[0]) <= EPSILON
