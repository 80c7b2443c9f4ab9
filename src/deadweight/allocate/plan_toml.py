"""A plan as a file for `deadweight train --config FILE`."""

from __future__ import annotations

from collections.abc import Mapping

from deadweight.allocate.plan import HeadPlan


def plan_toml(plan: HeadPlan, data: Mapping[str, str] | None = None) -> str:
    """The tables [model], [data] (the text that was measured) and [train]; all other settings have their defaults."""
    from deadweight.train.settings import as_toml, make_run

    shape, sharing = plan.shape, plan.rules.sharing
    sizes = [layer.size for layer in plan.layers]
    model = {
        "d_model": shape.d_model,
        "n_layers": shape.n_layers,
        "context": shape.context,
        "heads": [layer.heads for layer in plan.layers],
        "key_heads": [layer.heads // sharing for layer in plan.layers],
        "d_qk": sizes,
        "d_v": sizes,
    }
    errors = [sum(layer.error for layer in layers) for layers in (plan.layers, plan.default)]
    header = (
        f"# deadweight allocate plan: {sum(map(plan.parameters, plan.layers)):,} attention parameters, bound "
        f"{errors[0]:.4g}; equal heads: {sum(map(plan.parameters, plan.default)):,}, bound {errors[1]:.4g}\n"
    )
    return header + as_toml(make_run({"model": model, "data": data or {}}))
