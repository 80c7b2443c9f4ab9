"""Which settings of a config may be narrow: found by trials, where the fully narrow config does not run.

The table of names knows the names of most widths, not which of them must divide or equal each other. Where the fully
narrow config does not run, its changes are applied in groups, and a group with which the model does not run is halved:
k bad changes among n cost about k·log n trials. Trials are built on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deadweight.source.narrow_settings import TABLE
from deadweight.source.type_aliases import RawConfig, Setting

Path = tuple[str, ...]
Change = tuple[Path, Setting]  # the path of a setting, and its new value (GONE: the setting is removed)
GONE = object()
TRIALS = 24
ORDER = {name: rank for rank, name in enumerate(TABLE)}


def loosen(wide: RawConfig, narrow: RawConfig, runs: Callable[[RawConfig], bool], trials: int = TRIALS) -> RawConfig:
    """The wide config, which runs, with as many settings of the narrow one as possible so that it still runs."""
    left = trials

    def settle(config: RawConfig, group: list[Change]) -> RawConfig:
        nonlocal left
        if not group or left <= 0:
            return config
        left -= 1
        changed = apply(config, group)
        if runs(changed):
            return changed
        half = len(group) // 2
        return settle(settle(config, group[:half]), group[half:]) if half else config

    return settle(wide, changes(wide, narrow))


def changes(wide: RawConfig, narrow: RawConfig) -> list[Change]:
    """The changes from the wide to the narrow config; heads come before the widths that they divide."""
    return sorted(_differences(wide, narrow, ()), key=lambda change: -ORDER.get(change[0][-1], len(ORDER)))


def _differences(wide: RawConfig, narrow: RawConfig, at: Path) -> Iterator[Change]:
    for name in dict.fromkeys([*wide, *narrow]):
        old, new = wide.get(name, GONE), narrow.get(name, GONE)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, (*at, name))
        elif not _same(old, new):
            yield (*at, name), new


def _same(old: Setting, new: Setting) -> bool:
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return list(old) == list(new)
    return bool(old == new)


def apply(config: RawConfig, group: list[Change]) -> RawConfig:
    """A copy of the config with these changes."""
    for (name, *inner), value in group:
        if inner:
            value = apply(config[name], [(tuple(inner), value)])
        config = {k: v for k, v in config.items() if k != name} | ({} if value is GONE else {name: value})
    return config
