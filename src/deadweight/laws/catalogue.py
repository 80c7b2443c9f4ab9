"""All laws, in the order in which they are tried: what is dead first, then what folds, then the gauges.

The order matters for counting: a later law leaves out what an earlier one has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

from deadweight.graph.node import Graph
from deadweight.laws import (
    batch_gain,
    centred_weight,
    dw001_unused,
    dw002_key_bias,
    dw003_value_bias,
    dw004_bias_before_statistics,
    dw005_mean_before_layernorm,
    dw006_norm_affine,
    dw007_post_norm_shift,
    dw008_lost_direction,
    dw009_query_key_basis,
    dw010_value_output_basis,
    dw011_hidden_unit_scale,
    dw012_residual_basis,
    dw013_added_tables,
    dw014_scale_before_norm,
    dw015_whole_projection,
    dw016_logit_shift,
    dw017_biases_at_one_place,
    dw018_softmax_elsewhere,
    dw019_linear_chain,
    norm_gain,
    normalised_weight,
    paired_rows,
    projected_state,
    tied_table,
)
from deadweight.laws.prover import Prover
from deadweight.laws.stabiliser import without_stabilisers

SEARCH_ORDER: tuple[ModuleType, ...] = (
    dw001_unused,
    dw002_key_bias,
    dw018_softmax_elsewhere,
    dw016_logit_shift,
    dw004_bias_before_statistics,
    dw005_mean_before_layernorm,
    centred_weight,
    dw003_value_bias,
    dw017_biases_at_one_place,
    dw013_added_tables,
    tied_table,
    paired_rows,
    dw006_norm_affine,
    dw007_post_norm_shift,
    dw008_lost_direction,
    norm_gain,
    batch_gain,
    dw009_query_key_basis,
    dw010_value_output_basis,
    dw011_hidden_unit_scale,
    dw012_residual_basis,
    dw015_whole_projection,
    dw019_linear_chain,
    projected_state,
    normalised_weight,
    dw014_scale_before_norm,
)


def search(graph: Graph, *, progress: Callable[[str], None] | None = None) -> Prover:
    """Every claim that some law proves of this graph."""
    prover = Prover(graph)
    for law in SEARCH_ORDER:
        if progress is not None:
            progress(f"{law.CODE} {law.NAME}")
        found: Iterable = law.find(prover)
        for claim in found:
            prover.claims.append(claim)
    prover.claims[:] = without_stabilisers(graph, prover.claims)
    return prover
