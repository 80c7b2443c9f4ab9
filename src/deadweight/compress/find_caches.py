"""Finding the caches of a model, and the way to observe them."""

from __future__ import annotations

from functools import partial

from deadweight.compress.attention_calls import (
    Watch,
    observing,
    reaches_attention,
    use_default_attention,
    use_our_attention,
)
from deadweight.compress.cache_support import reads_own_caches
from deadweight.compress.cache_taps import locate_cached, tapping
from deadweight.compress.locate import Heads, locate
from deadweight.source.model import Source


def find_caches(source: Source, *, live: bool) -> tuple[tuple[Heads, ...], Watch]:
    """The attentions whose caches are to be coded, and the context in which they are observed.

    If attention reads its cache as it is, and transformers' interface reaches it, it will read codes. Otherwise, and
    behind an encoder, the model's own code will read decoded states. A `live` model, not read from a folder, keeps the
    attention that it has.
    """
    model, reached = source.module, reaches_attention(source.module)
    crosses = getattr(source.config, "is_encoder_decoder", False)
    attentions = locate(source, sinks=True) if reached and not crosses else ()
    if attentions and reads_own_caches(source):
        use_our_attention(model)
        return attentions, observing
    if not reached and not live:
        use_default_attention(model)
    attentions = locate_cached(source)
    if reached:
        use_our_attention(model)
    forms = {heads.path: heads.form for heads in attentions if heads.form is not None}
    return attentions, partial(tapping, forms=forms)
