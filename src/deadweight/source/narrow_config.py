"""A narrow config of the same architecture: the table of names, applied to nested dicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from deadweight.source.narrow_settings import (
    DEPTH,
    DERIVED,
    EXCEPTIONS,
    FILLED,
    LAYERS,
    MISSING,
    NOT_BY_LAYER,
    OR_BY_LAYER,
    TABLE,
    Shrunk,
)
from deadweight.source.narrow_sizes import VOCABULARY, Size
from deadweight.source.type_aliases import RawConfig, Setting


def shrink(config: RawConfig, size: Size, kind: str = "") -> RawConfig:
    """The narrow form of a config's dict, nested configs included; `kind` is the name of one without a model_type."""
    kind = config.get("model_type") or kind
    rules = TABLE | EXCEPTIONS.get(kind, {})
    narrow = _shrink(config, size, rules, _moved_ids(config))
    return narrow | {name: value for name, value in MISSING.get(kind, {}).items() if not config.get(name)}


def shallow(config: RawConfig, size: Size, kind: str = "") -> RawConfig:
    """The same widths, but only one layer of each kind (and at least two layers)."""
    return _shrink(config, size, DEPTH, {})


def _shrink(config: RawConfig, size: Size, rules: dict[str, Shrunk], moved: dict[int, int]) -> RawConfig:
    layers = _chosen_layers(config, size)
    whole = rules is not DEPTH
    out: RawConfig = {}
    for name, old in config.items():
        if name in DERIVED:
            continue
        if isinstance(old, dict) and name.startswith("rope"):
            out[name] = _shrink_rope(old, size, config) if whole else old
        elif isinstance(old, dict) and old and all(str(key).isdigit() for key in old):
            out[name] = _by_layer(old, layers or tuple(range(size.layers)), shrink if whole else shallow, size)
        elif isinstance(old, dict):
            out[name] = (shrink if whole else shallow)(old, size, f"{config.get('model_type')}.{name}")
        elif layers and _is_by_layer(name, old, _n_layers(config)):
            out[name] = [_value(rules.get(name), old[i], size, _at_layer(config, i)) for i in layers]
        elif layers and name in OR_BY_LAYER and isinstance(old, int):
            out[name] = [_value(rules.get(name), old, size, _at_layer(config, i)) for i in layers]
        elif name in LAYERS and layers and isinstance(old, int):
            out[name] = len(layers)
        elif _is_id(name):
            out[name] = moved.get(old, old) if isinstance(old, int) else _each(old, lambda i: moved.get(i, i))
        elif old is None:
            out[name] = rules[name](size, None, config) if name in FILLED and name in rules else None
        else:
            out[name] = _value(rules.get(name), old, size, config)
    return out


def _by_layer(
    old: dict[Setting, Setting], layers: tuple[int, ...], change: Callable[..., Setting], size: Size
) -> dict[Setting, Setting]:
    """Settings of single layers, by number: those of the chosen layers, renumbered."""
    settings = {int(key): value for key, value in old.items()}
    kept = {new: settings[layer] for new, layer in enumerate(layers) if layer in settings}
    return {new: change(value, size) if isinstance(value, dict) else value for new, value in kept.items()}


def _value(rule: Shrunk | None, old: Setting, size: Size, around: RawConfig) -> Setting:
    if isinstance(old, (list, tuple)):
        return [_value(rule, inner, size, around) for inner in old]
    if rule is None or isinstance(old, (bool, str)) or not isinstance(old, (int, float)):
        return old
    return min(old, rule(size, old, around))


def _each(old: Setting, change: Callable[[Setting], Setting]) -> Setting:
    return [change(i) if isinstance(i, int) else i for i in old] if isinstance(old, (list, tuple)) else old


def _is_id(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index", "_token_ids", "_index", "_idx"))


def _moved_ids(config: RawConfig) -> dict[int, int]:
    """Token ids outside the narrow vocabulary move to its end, to distinct ids as long as there are free ones."""
    values = [config[name] for name in sorted(config) if _is_id(name)]
    flat = [i for value in values for i in (value if isinstance(value, (list, tuple)) else [value])]
    ids = list(dict.fromkeys(i for i in flat if isinstance(i, int) and not isinstance(i, bool)))
    kept = {i for i in ids if 0 <= i < VOCABULARY}
    free = [i for i in reversed(range(VOCABULARY)) if i not in kept] or [VOCABULARY - 1]
    return {old: free[k % len(free)] for k, old in enumerate(i for i in ids if i >= VOCABULARY)}


def _n_layers(config: RawConfig) -> int:
    return next((config[name] for name in LAYERS if isinstance(config.get(name), int)), 0)


def _is_by_layer(name: str, value: Setting, n_layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == n_layers and name not in NOT_BY_LAYER


def _at_layer(config: RawConfig, layer: int) -> RawConfig:
    """The config as one layer sees it."""
    n_layers = _n_layers(config)
    return {k: v[layer] if _is_by_layer(k, v, n_layers) else v for k, v in config.items()}


def _chosen_layers(config: RawConfig, size: Size) -> tuple[int, ...]:
    """One layer of each kind that the per-layer lists distinguish, at least two; empty if there are no such lists."""
    n_layers = _n_layers(config)
    lists = [v for k, v in config.items() if _is_by_layer(k, v, n_layers) and not _is_id(k)]
    if n_layers < 2 or not lists:
        return ()
    kinds: dict[str, list[int]] = defaultdict(list)
    for layer in range(n_layers):
        kinds[repr([values[layer] for values in lists])].append(layer)
    chosen = [layer for same in list(kinds.values())[:6] for layer in same[: size.repeat]]
    spare = [layer for layer in range(n_layers) if layer not in chosen]
    return tuple(sorted(chosen + spare[: max(0, size.layers - len(chosen))]))


def _shrink_rope(rope: RawConfig, size: Size, around: RawConfig) -> RawConfig:
    """Rotary settings: per-frequency lists are cut, and sections are spread over the remaining frequencies."""
    n_frequencies = size.head // 2
    out: RawConfig = {}
    if size.sections and "rope_type" in rope and "mrope_section" not in rope:
        rope = rope | {"mrope_section": [0, 0, 0]}
        n_frequencies //= 2 if _is_partial(rope, around) else 1
    for name, old in rope.items():
        if isinstance(old, dict):
            out[name] = _shrink_rope(old, size, around)
        elif name in ("short_factor", "long_factor") and isinstance(old, (list, tuple)):
            out[name] = list(old[: max(1, n_frequencies // (2 if _is_partial(rope, around) else 1))])
        elif name == "mrope_section" and isinstance(old, (list, tuple)):
            out[name] = [n_frequencies // len(old) + (i < n_frequencies % len(old)) for i in range(len(old))]
        else:
            out[name] = _value(TABLE.get(name), old, size, around)
    return out


def _is_partial(rope: RawConfig, around: RawConfig) -> bool:
    return (rope.get("partial_rotary_factor") or around.get("partial_rotary_factor") or 1.0) < 1
