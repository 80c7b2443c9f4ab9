"""Attention of a compressed checkpoint: of every head's keys and values only what is kept is stored and multiplied.

It needs torch and transformers alone, so that it can travel with the checkpoint. The model's own code goes on to see
heads of their old size: places that were given up hold zeros. Between it and the cache stands a `Packing`, which takes
the kept places out; between it and the softmax stands `packed_attention`, which works on them alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

decode: Any
try:
    from .kernels import decode, gathers
except ImportError:  # no Triton
    decode = None

NAME = "deadweight"  # of this attention among those of transformers
DEVICES = ("cuda",)  # where the kernel for one token runs
UNEVEN = "deadweight_uneven"  # marks a cache whose positions do not count up by one
HARMLESS = {  # what attention is told and need not know
    "position_ids",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "sliding_window",
    "use_cache",
    "position_embeddings",
}


class Packing(nn.Module):
    """How much of the keys of every set of joined key heads, and of the values of every group of merged ones, is kept.

    Of values the first dimensions are kept; of keys too, unless their places are chosen (rotary positions bind a place
    to its frequency). Where `merged` key heads share their values, `up` makes of what a query head has gathered the
    output that its own values would have given. Where `joined` ones share their keys, `ask` and `turn` make of a query
    one that meets them: keys then hold still dimensions, the first places of planes, and their second places. If they
    are late, keys are cached before positions; `expand`, `shift` and `rates` make of them what queries meet. Packed,
    keys and values are (batch, sets, tokens, kept) where all keep the same number, and else lie side by side in
    (batch, 1, tokens, all kept): both alike, for a static cache gives them the same number of heads.
    """

    positions: Tensor | None = None  # of the tokens that a late packing is given
    first: Tensor | None = None  # the position of the first cached key, if they count up by one
    exact: Tensor | None = None  # the positions of all cached keys, where all of them are new
    cache: Any = None  # that they lie in
    key_places: Tensor
    turn: Tensor
    expand: Tensor
    shift: Tensor
    plane_places: Tensor
    rates: Tensor
    query_places: Tensor
    still_places: Tensor

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.key_heads = spec["heads"], spec["key_heads"]
        self.merged, self.joined = spec["merged"], spec.get("joined", 1)
        self.d_qk, self.d_v = spec["d_qk"], spec["d_v"]
        self.keys, self.values = tuple(spec["keys"]), tuple(spec["values"])
        self.planes, self.still = tuple(spec.get("planes", ())), spec.get("still", 0)  # of joined keys
        self.chosen, self.late = spec["chosen"], spec.get("late", 0)
        self.needed = spec["needed"] or self.merged > 1 or self.joined > 1  # what is given up does not hold zeros
        if self.chosen:
            self.register_buffer("key_places", torch.zeros(sum(self.keys), dtype=torch.int32))
        if self.merged > 1:
            shares = self.heads // len(self.values)
            for i, kept in enumerate(self.values):
                self.register_parameter(f"up_{i}", nn.Parameter(torch.empty(shares, self.d_v, kept)))
        if self.late:
            whole = self.joined * self.d_qk  # the map of a set is (whole, kept)
            self.register_parameter("expand", nn.Parameter(torch.empty(whole * sum(self.keys))))
            self.register_parameter("shift", nn.Parameter(torch.empty(len(self.keys), self.joined, self.d_qk)))
            if 2 * self.late < self.d_qk:
                self.register_buffer("still_places", torch.zeros(self.d_qk - 2 * self.late, dtype=torch.int32))
            self.register_buffer("plane_places", torch.zeros(2 * self.late, dtype=torch.int32))
            self.register_buffer("rates", torch.zeros(self.late, dtype=torch.int32))
        elif self.joined > 1:
            self.register_queries()

    def register_queries(self) -> None:
        """What queries need to meet joined keys."""
        shares, turned = self.heads // len(self.keys), self.still < self.d_qk
        for i, (kept, planes) in enumerate(zip(self.keys, self.planes, strict=True)):
            if self.still:
                self.register_parameter(f"ask_{i}", nn.Parameter(torch.empty(shares, self.still, kept - 2 * planes)))
        if turned:
            self.register_parameter("turn", nn.Parameter(torch.empty(2 * shares * sum(self.planes))))  # (shares, 2, P)
            self.register_buffer("query_places", torch.zeros(2 * sum(self.planes), dtype=torch.int32))
        if turned and self.still:
            self.register_buffer("still_places", torch.zeros(self.still, dtype=torch.int32))

    @property
    def groups(self) -> int:
        return self.heads // self.key_heads

    @property
    def apart(self) -> bool:
        """Whether sets lie apart in the cache."""
        return len(self.keys) == len(self.values) and len(set(self.keys)) == len(set(self.values)) == 1

    def packed(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, (b, heads, t, size), without what is not kept."""
        if self.late:
            key = self.at_positions(key, self.new_positions(key), back=True)
        key, value = side_by_side(key, self.joined), side_by_side(value, self.merged)
        keys = [self.kept(key[:, i], i) for i in range(len(self.keys))]
        values = [value[:, i, :, :kept] for i, kept in enumerate(self.values)]
        return beside(keys, self.apart), beside(values, self.apart)

    def kept(self, states: Tensor, index: int) -> Tensor:
        """The kept places of the keys of one set, or of the queries that meet them if they are not joined."""
        if not self.chosen:
            return states[..., : self.keys[index]]
        at = sum(self.keys[:index])
        return states.index_select(-1, self.key_places[at : at + self.keys[index]])

    def is_packed(self, key: Tensor, value: Tensor) -> bool:
        shapes = [(len(x), x[0]) if self.apart else (1, sum(x)) for x in (self.keys, self.values)]
        return shapes == [(z.shape[1], z.shape[-1]) for z in (key, value)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """Attention on packed keys and values: (b, h, t, d_v), with zeros where values are not kept."""
        if self.late:
            self.check_counting(how.get("mask"))
        if query.shape[2] == 1:
            places = self.key_places if self.chosen and self.joined == 1 else None
            more = self.turning(key)
            places = self.query_places if len(more) == 1 else places
            ups = [getattr(self, f"up_{i}").to(query.dtype) for i in range(len(self.values))] if self.merged > 1 else []
            out = one_token(self.asking(query), key, value, self.keys, self.values, places, more, ups, **how)
            if out is not None:
                return F.pad(out, (0, self.d_v - out.shape[-1])) if out.shape[-1] < self.d_v else out
        found = []
        whole = self.whole_keys(key) if self.late else None
        for first, last in self.runs():
            q = self.queries(query, first, last)
            k = (
                whole[:, first:last]
                if whole is not None
                else some_heads(key, self.keys, first // self.joined, (last - 1) // self.joined + 1)
            )
            v = some_heads(value, self.values, first // self.merged, (last - 1) // self.merged + 1)
            found.append(self.restored(attention(q, k, v, **how), first, last))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def queries(self, query: Tensor, first: int, last: int) -> Tensor:
        """What meets the packed keys of some key heads, (b, heads, t, kept), of queries of whole size."""
        if self.late:
            return query[:, first * self.groups : last * self.groups]
        found = []
        for i in range(first // self.joined, (last - 1) // self.joined + 1):
            start, stop = max(first, i * self.joined), min(last, (i + 1) * self.joined)
            own = query[:, start * self.groups : stop * self.groups]
            found.append(self.kept(own, i) if self.joined == 1 else self.turned(own, i, start - i * self.joined))
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    def asking(self, query: Tensor) -> Tensor:
        """Queries of all heads as the kernel takes them: what meets joined keys, with zeros up to the widest.

        With late keys: as they are, and behind them what meets those places of late keys that are not turned. Where
        planes are all there is, the kernel turns them.
        """
        if self.joined == 1 or (2 * self.late == self.d_qk if self.late else not self.still):
            return query
        if self.late:
            sets = query.index_select(-1, self.still_places).unflatten(1, (len(self.keys), self.joined, -1)).unbind(1)
            maps = [x.index_select(1, self.still_places) for x in self.expansions(query.dtype)]
            met = [(q @ x[:, None]).flatten(1, 2) for q, x in zip(sets, maps, strict=True)]  # b heads 1 kept
            wide = [F.pad(q, (0, max(self.keys) - q.shape[-1])) for q in met]
            return torch.cat([query, torch.cat(wide, 1)], -1)
        sets = [self.queries(query, i * self.joined, (i + 1) * self.joined) for i in range(len(self.keys))]
        return torch.cat([F.pad(q, (0, max(self.keys) - q.shape[-1])) for q in sets], 1)

    def turned(self, query: Tensor, index: int, member: int) -> Tensor:
        """Queries, from those of the member-th head of a set on, as what meets the joined keys of that set.

        A plane (a, b) becomes (αa + βb, αb − βa) for every number that is kept of it.
        """
        heads = slice(member * self.groups, member * self.groups + query.shape[1])
        found = []
        if self.still:
            still = query.index_select(-1, self.still_places) if self.still < self.d_qk else query
            found.append(still @ getattr(self, f"ask_{index}")[heads].to(query.dtype))
        if self.still < self.d_qk:
            start, count = 2 * sum(self.planes[:index]), self.planes[index]
            a, b = query.index_select(-1, self.query_places[start : start + 2 * count]).split(count, -1)
            shares = self.heads // len(self.keys)
            turn = self.turn[shares * start : shares * (start + 2 * count)].view(shares, 2, 1, count)
            along, across = turn[heads].to(query.dtype).unbind(1)
            found += [along * a + across * b, along * b - across * a]
        return torch.cat(found, -1) if len(found) > 1 else found[0]

    def whole_keys(self, key: Tensor) -> Tensor:
        """What queries meet, (b, key heads, t, d), of packed keys that were cached before positions."""
        found = []
        for i, expand in enumerate(self.expansions(key.dtype)):
            kept = some_heads(key, self.keys, i, i + 1)[:, 0]
            heads = F.linear(kept, expand.flatten(0, 1), self.shift[i].flatten().to(key.dtype))
            found.append(heads.unflatten(-1, (self.joined, -1)))
        whole = torch.cat(found, 2).transpose(1, 2)  # b g t d
        return self.at_positions(whole, self.all_positions(whole.shape[2], key.device))

    def all_positions(self, length: int, device: torch.device) -> Tensor:
        """Of so many cached keys, (b or 1, t); what lies behind the last new key is not seen by anyone."""
        count = torch.arange(length, device=device)
        if self.first is None:
            return count[None] if self.positions is None else self.positions
        if self.exact is None:
            return self.first + count
        return torch.cat([self.exact, self.exact[:, -1:] + 1 + count[self.exact.shape[1] :]], 1)

    def check_counting(self, mask: Tensor | None) -> None:
        """Later steps know of cached keys only where the last one is: those that it sees must count up by one.

        If they do not, the cache is marked, and refused when it is used again.
        """
        at, cache, self.cache = self.exact, self.cache, None
        if at is None or self.first is None or at.shape[1] == 1 or torch.compiler.is_compiling() or capturing(at):
            return
        wrong = at != self.first + torch.arange(at.shape[1], device=at.device)
        if mask is not None:
            last = mask[:, 0, -1, : at.shape[1]]
            wrong = wrong & (last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min)
        setattr(cache, UNEVEN, bool(wrong.any()))

    def expansions(self, dtype: torch.dtype) -> list[Tensor]:
        """What makes whole keys of late ones, (heads, size, kept) for every set."""
        maps = self.expand.to(dtype).split([self.joined * self.d_qk * kept for kept in self.keys])
        return [x.view(self.joined, self.d_qk, kept) for x, kept in zip(maps, self.keys, strict=True)]

    def turning(self, key: Tensor) -> list[Tensor]:
        """What the kernel needs for late keys: how to expand them, the places and rates of planes, their positions.

        For other joined keys that are planes alone: how to turn queries.
        """
        if not self.late:
            return [self.turn.to(key.dtype)] if self.joined > 1 and not self.still else []
        first = self.new_positions(key)[:, :1] if self.first is None else self.first
        maps = (self.expand.to(key.dtype), self.shift.to(key.dtype))
        return [*maps, self.plane_places, self.rates.view(torch.float32), first.expand(len(key), 1)]

    def new_positions(self, key: Tensor) -> Tensor:
        return torch.arange(key.shape[2], device=key.device)[None] if self.positions is None else self.positions

    def at_positions(self, states: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """Heads (b, g, t, d) turned as at these positions, (b or 1, t), or turned back."""
        angle = positions[..., None].float() * self.rates.view(torch.float32)  # b t P
        cos, sin = (f(angle).unsqueeze(1).to(states.dtype) for f in (torch.cos, torch.sin))
        places = self.plane_places.long()
        a, b = states[..., places].split(self.late, -1)
        sin = -sin if back else sin
        return states.index_copy(-1, places, torch.cat([a * cos - b * sin, a * sin + b * cos], -1))

    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring key heads that one attention can serve: of the same sizes, and of whole groups or inside one."""
        if len(set(self.keys)) == 1 and len(set(self.values)) == 1:
            return [(0, self.key_heads)]

        def alike(i: int) -> tuple[int, ...]:
            k, v = i // self.joined, i // self.merged
            return (
                0 if self.late else self.keys[k] if self.joined == 1 else k,
                self.values[v] if self.merged == 1 else v,
            )

        starts = [i for i in range(self.key_heads) if i == 0 or alike(i) != alike(i - 1)]
        return list(zip(starts, [*starts[1:], self.key_heads], strict=True))

    def restored(self, out: Tensor, first: int, last: int) -> Tensor:
        """The outputs of whole heads from what was gathered of the kept values."""
        if self.merged == 1:
            return F.pad(out, (0, self.d_v - out.shape[-1]))
        ups = [getattr(self, f"up_{i}") for i in range(first // self.merged, (last - 1) // self.merged + 1)]
        up = torch.cat(ups) if len(ups) > 1 else ups[0]
        start = (first % self.merged) * self.groups
        return torch.einsum("bhtr,hdr->bhtd", out, up[start : start + out.shape[1]].to(out.dtype))


def capturing(states: Tensor) -> bool:
    return states.is_cuda and torch.cuda.is_current_stream_capturing()


def side_by_side(states: Tensor, count: int) -> Tensor:
    """(b, g, t, d) as (b, g / count, t, count·d): neighbouring heads as one."""
    return states.unflatten(1, (-1, count)).transpose(2, 3).flatten(3)


def beside(states: list[Tensor], apart: bool) -> Tensor:
    """(b, t, kept) of every head as one tensor."""
    if len(states) == 1:
        return states[0].unsqueeze(1)
    return torch.stack(states, 1) if apart else torch.cat(states, -1).unsqueeze(1)


def some_heads(states: Tensor, sizes: tuple[int, ...], first: int, last: int) -> Tensor:
    """The states of neighbouring heads of one size, (b, heads, t, kept)."""
    if states.shape[1] == len(sizes):
        return states[:, first:last]
    start, stop = sum(sizes[:first]), sum(sizes[:last])
    return states[:, 0, :, start:stop].unflatten(-1, (last - first, sizes[first])).transpose(1, 2)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scaling: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scaling · Q Kᵀ + mask) V. Keys, and values, may each be shared by groups of query heads of their own."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, single = query.shape[1], query.shape[2] == 1
    if softcap is not None or (single and dropout == 0):
        keys, values = ((z.shape[-1],) * z.shape[1] for z in (key, value))
        out = one_token(query, key, value, keys, values, None, [], [], mask, scaling, causal, dropout, softcap)
        if out is not None:
            return out
        return spelled_out(query, key, value, mask, scaling, causal, dropout, softcap)
    size = value.shape[-1]
    query, key, value = alike(query, key, value)
    if key.shape[1] < heads and key.shape[1] == value.shape[1] and mask is None:
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=True
        )
        return out[..., :size]
    key, value = (z.repeat_interleave(heads // z.shape[1], 1) for z in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )[..., :size]


def alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, of one size that is a multiple of 8, filled up with zeros: others torch can only do spelled out."""
    size = -(-max(key.shape[-1], value.shape[-1]) // 8) * 8
    query, key, value = (F.pad(z, (0, size - z.shape[-1])) if z.shape[-1] < size else z for z in (query, key, value))
    return query, key, value


def one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: tuple[int, ...],
    values: tuple[int, ...],
    places: Tensor | None,
    turning: list[Tensor],
    ups: list[Tensor],
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    dropout: float,
    softcap: float | None,
) -> Tensor | None:
    """What one token gathers of all packed heads, by the kernel; None where that is not for it."""
    if decode is None or query.device.type not in DEVICES or query.shape[2] > 1 or dropout or softcap is not None:
        return None
    if torch.is_grad_enabled() and any(z.requires_grad for z in (query, key, value, *turning, *ups)):
        return None
    if mask is not None and mask.shape[1:] != (1, 1, key.shape[2]):
        return None
    if not gathers(query, key, value, keys, values, turning):
        return None
    return decode(query, key, value, mask, places, turning, keys, values, scaling, ups)


def spelled_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """Two products that read each key and each value once for all the query heads that share it."""
    b, h, t, _ = query.shape
    shared = query.reshape(b, key.shape[1], -1, query.shape[-1])  # the query heads of a key head as rows
    scores = (shared @ key.transpose(-1, -2)).view(b, h, t, -1) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        least = torch.finfo(scores.dtype).min  # a row that sees nothing, as padding does, must not become NaN
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    weights = F.dropout(weights, dropout) if dropout else weights
    return (weights.reshape(b, value.shape[1], -1, weights.shape[-1]) @ value).view(b, h, t, -1)


def how_of(module: nn.Module, query: Tensor, mask: Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
    """What transformers says about one attention, in our words; what is not known here is refused."""
    extra = {n: v for n, v in given.items() if v is not None and v is not False}
    known = {"scaling", "dropout", "is_causal", "softcap"} | HARMLESS
    if strange := sorted(set(extra) - known):
        raise NotImplementedError(f"attention with {', '.join(strange)}, which compressed heads do not know")
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return {
        "mask": mask,
        "scaling": given.get("scaling"),
        "causal": bool(causal) and mask is None and query.shape[2] > 1,
        "dropout": given.get("dropout") or 0.0,
        "softcap": given.get("softcap"),
    }


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention, on packed keys and values where the module has a packing."""
    how = how_of(module, query, attention_mask, given)
    packing: Any = getattr(module, "packing", None)
    if packing is None:
        return attention(query, key, value, **how).transpose(1, 2).contiguous(), None
    if how["scaling"] is None:
        how["scaling"] = packing.d_qk**-0.5
    packed = packing.is_packed(key, value)
    if not packed and packing.needed:
        (key, value), packed = packing.packed(key, value), True
    out = packing.attend(query, key, value, **how) if packed else attention(query, key, value, **how)
    return out.transpose(1, 2).contiguous(), None


class PackedCache:
    """A cache that is given whole keys and values and stores packed ones."""

    def __init__(self, cache: Any, packing: Packing) -> None:
        self._cache, self._packing = cache, packing

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packing = self._packing
        if not packing.late:
            return self._cache.update(*packing.packed(key_states, value_states), *args, **kwargs)
        seen, new = self._cache.get_seq_length(*args[:1]), key_states.shape[2]
        seen = seen.clone() if isinstance(seen, Tensor) else seen  # a static cache counts on in it
        if getattr(self._cache, UNEVEN, False) and not (isinstance(seen, int) and seen == 0):
            raise NotImplementedError(
                "keys that are cached before rotary positions, and positions that did not count up by one: expected "
                "padding on the left, or use_cache=False"
            )
        if packing.positions is None:
            packing.positions = seen + torch.arange(new, device=key_states.device)[None]
        key, value = self._cache.update(*packing.packed(key_states, value_states), *args, **kwargs)
        packing.first = packing.positions[:, -1:] - (torch.as_tensor(seen + new).clamp(max=key.shape[2]) - 1)
        all_new = isinstance(seen, int) and seen == 0 and new <= key.shape[2]
        packing.exact, packing.cache = (packing.positions, self._cache) if all_new else (None, None)
        return key, value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        return PackedCache(found, self._packing) if isinstance(found, Cache) else found

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # the model's code asks what kind of cache it has
        return type(self.__dict__.get("_cache", self))  # torch.compile asks before there is one


def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Every cache that an attention module is called with stores packed keys and values."""

    def wrapped(value: Any) -> Any:
        plain = isinstance(value, Cache) and type(value) is not PackedCache
        return PackedCache(value, module.packing) if plain else value

    if module.packing.late:
        module.packing.positions, module.packing.first = kwargs.get("position_ids"), None
        module.packing.exact = module.packing.cache = None
    return tuple(wrapped(a) for a in args), {n: wrapped(v) for n, v in kwargs.items()}


def register() -> None:
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def give_bias(linear: Any) -> None:
    """A bias where the class has none: it holds the means of the values that are not kept."""
    if linear._parameters.get("bias") is None:
        size = linear.out_features if isinstance(linear, nn.Linear) else linear.nf
        linear.register_parameter("bias", nn.Parameter(torch.zeros(size)))


def install_attention(model: Any, specs: dict[str, dict[str, Any]]) -> None:
    """Give every attention module that the checkpoint describes its packing."""
    register()
    for path, spec in specs.items():
        module = model.get_submodule(path)
        module.packing = Packing(spec)
        if spec.get("bias"):
            give_bias(model.get_submodule(spec["bias"]))
        module.register_forward_pre_hook(before, with_kwargs=True)
    model.set_attn_implementation(NAME)
