"""Every claim about many architectures, against gradients that share no code with the proofs or with the evidence.

For each architecture: its narrow clone is traced and searched; then, in float64 with random parameters, a random
functional of the outputs is differentiated by plain autograd for several random inputs. What is called dead has no
gradient, what is called a dead mean has gradients that sum to zero, no motion of any claim changes the functional;
and a bias without gradient that no claim covers must be among the things that the audit reports as unexplained.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from deadweight.audit.evidence import Gradients
from deadweight.audit.zero_gradients import unexplained_zeros
from deadweight.claims.claim import Claim
from deadweight.claims.point import Motion, Point
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.source.model import Source, open_model
from deadweight.source.narrow_clone import narrow, shallow_config

Values = dict[str, Tensor]

CAUSAL = [
    "BloomForCausalLM",
    "CodeGenForCausalLM",
    "CohereForCausalLM",
    "FalconForCausalLM",
    "Gemma2ForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "MptForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "PersimmonForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "XGLMForCausalLM",
    "DeepseekV3ForCausalLM",
]
MASKED = [
    "AlbertForMaskedLM",
    "BertForMaskedLM",
    "ConvBertForMaskedLM",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "MPNetForMaskedLM",
    "ModernBertForMaskedLM",
    "RobertaForMaskedLM",
    "SqueezeBertForMaskedLM",
]
ENCODERS = ["BertModel", "XLMRobertaModel"]
ENCODER_DECODERS = [
    "BartForConditionalGeneration",
    "T5ForConditionalGeneration",
]
VISION = ["BeitModel", "CLIPVisionModel", "DeiTModel", "Dinov2Model", "SiglipVisionModel", "ViTModel"]
SOUND = ["ASTModel", "HubertModel", "WhisperForConditionalGeneration"]
ARCHITECTURES = [*CAUSAL, *MASKED, *ENCODERS, *ENCODER_DECODERS, *VISION, *SOUND]

DRAWS = 6
QUICK = ("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM")  # the others are marked slow
ZERO = 1e-10  # of a typical gradient: rounding in float64 leaves about 1e-14, a live element gives about 1
STILL = 1e-8  # of |g||t|: motions are built from inverses of random matrices, which cost some digits


def test_the_matrix_is_wide() -> None:
    assert len(set(ARCHITECTURES)) >= 40


@pytest.mark.parametrize(
    "architecture", [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES]
)
def test_gradients_agree_with_every_claim(architecture: str, tmp_path: Path) -> None:
    source = clone_of(architecture, tmp_path)
    graph = canonical(trace(source.module, source.args, source.kwargs))
    prover = search(graph)
    assert prover.claims, "a transformer without a single redundant dimension"
    values = {name: float64(tensor) for name, tensor in graph.tensors.items()}
    inputs = [bound_inputs(graph, source, seed) for seed in range(DRAWS)]
    grads = [gradient(graph, values, drawn, seed) for seed, drawn in enumerate(inputs)]
    largest = {n: torch.stack([g[n].abs() for g in grads]).amax(0) for n in grads[0]}
    typical = float(torch.cat([g.reshape(-1) for g in largest.values()]).mean())
    stacked = {n: torch.stack([g[n] for g in grads]).flatten(1) for n in grads[0]}
    sizes = torch.cat(list(stacked.values()), 1).square().mean(1).sqrt()

    point = Point(graph, values, inputs[0])
    for claim in prover.claims:
        assert dead_gradient(claim, grads) <= ZERO * typical, said(graph, claim)
        allowed = max(STILL, 1e4 * claim.epsilon if claim.tier == "epsilon" else 0.0)
        for motion in claim.motions(point):
            assert float(along(stacked, sizes, motion).max()) <= allowed, said(graph, claim)

    taken = Gradients(tuple(grads), (0.0,) * len(grads), 0)
    zeros = unexplained_zeros(prover.claims, graph, values, lambda seed: inputs[seed], taken.zero_elements())
    reported = {u.parameter for u in zeros}
    for node, name in graph.parameters.items():
        if node in largest and largest[node].ndim == 1 and "bias" in name:
            missed = (largest[node] <= 1e-12 * typical) & ~covered(prover.claims, node, largest[node])
            assert not missed.any() or name in reported or has_switches(graph), f"{name}: {missed.nonzero()}"


def clone_of(architecture: str, folder: Path) -> Source:
    """The narrow clone of the architecture's default config."""
    cls = getattr(transformers, architecture)
    config = shallow_config(cls.config_class())
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return narrow(open_model(folder / "config.json"), seed=3)


def bound_inputs(graph: Graph, source: Source, seed: int) -> Values:
    args, kwargs = source.draw(torch.Generator().manual_seed(100 + seed))
    return bind(graph, args, kwargs)


def float64(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64) if tensor.is_floating_point() else tensor.detach()


def gradient(graph: Graph, values: Values, inputs: Values, seed: int) -> Values:
    """Of a random functional of all outputs, with respect to every parameter."""
    leaves = {n: values[n].clone().requires_grad_() for n in graph.parameters if values[n].is_floating_point()}
    outputs = evaluate(graph, {**values, **leaves}, inputs)
    outputs = [out for out in outputs if isinstance(out, Tensor) and out.is_floating_point()]
    assert all(out.dtype == torch.float64 for out in outputs)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    total = torch.stack([(out * weight).sum() for out, weight in zip(outputs, weights, strict=True)]).sum()
    result = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(values[n]) if g is None else g for n, g in zip(leaves, result, strict=True)}


def dead_gradient(claim: Claim, grads: list[Values]) -> float:
    """The largest gradient of any group of elements that moves alone and is called dead."""
    if not isinstance(claim, ShiftClaim) or claim.verdict != "dead" or claim.lost or claim.profile or claim.absorbers:
        return 0.0
    worst = 0.0
    for g in grads:
        labels = claim.groups.expand(g[claim.node].shape).reshape(-1).long()
        sums = torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add_(0, labels, g[claim.node].reshape(-1))
        worst = max(worst, float(sums[1:].abs().max()))
    return worst


def covered(claims: list[Claim], node: str, like: Tensor) -> Tensor:
    """The elements that some claim calls dead one by one."""
    result = torch.zeros(like.shape, dtype=torch.bool)
    for claim in claims:
        if isinstance(claim, ShiftClaim) and claim.node == node and claim.verdict == "dead":
            labels = claim.groups.expand(like.shape)
            single = [group for group in labels.unique().tolist() if group and int((labels == group).sum()) == 1]
            result |= torch.isin(labels, torch.tensor(single, dtype=labels.dtype))
    return result


def along(stacked: Values, sizes: Tensor, motion: Motion) -> Tensor:
    """For each draw |g·t|, over the sum of its terms' sizes and a typical |g| times |t|."""
    terms = torch.cat([stacked[n] * t.reshape(-1) for n, t in motion.items()], 1)
    length = torch.cat([t.reshape(-1) for t in motion.values()]).norm()
    return terms.sum(1).abs() / (terms.abs().sum(1) + sizes * length)


def has_switches(graph: Graph) -> bool:
    """Units that may be off, experts that may not be chosen, for all inputs drawn: zeros without a law."""
    return any(node.op in ("aten.relu", "aten.topk") for node in graph.nodes.values())


def said(graph: Graph, claim: Claim) -> str:
    return "\n".join([f"{claim.code} {graph.parameters[claim.node]} {claim.verdict}", *claim.proof])
