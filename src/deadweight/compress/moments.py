"""Second moments of what passes through every head, and of the gradient with respect to it.

Let z be a vector that a head passes on and ∂z the gradient of the loss with respect to it. Replacing z by z + δ changes
the loss, to second order and with labels drawn from the model's own predictions (so that the first order vanishes and
the loss is the KL divergence from the original), by ½ E(∂z·δ)². With δ linear in z, the moments below are all that is
needed to predict any truncation.

Key heads may be merged: their values then lie side by side, and a query head is seen to gather all of them, of which it
uses its own. Nothing changes, but a few dimensions shared by all may say what each head would need many for. The same
for keys: heads may be joined, and a query then meets the keys of all of them, with zeros where they are not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deadweight.compress.joined import answers, as_complex
from deadweight.compress.judge import AT_A_TIME, called, main_output
from deadweight.compress.late import turned_back, turned_by
from deadweight.compress.locate import Heads
from deadweight.compress.observe import Attend, observing
from deadweight.compress.streaming import NotAloneError, run_again
from deadweight.errors import DeadweightError
from deadweight.slim.attention import side_by_side


def second(x: Tensor) -> Tensor:
    """Σ x xᵀ over rows and tokens for every head, in float64: (b, h, t, d) → (h, d, d)."""
    flat = x.transpose(0, 1).flatten(1, 2)
    return (flat.transpose(1, 2) @ flat).double().cpu()


def is_finite(x: Tensor) -> bool:
    """Whether no number is infinite or none at all: a sum says so in half the time, unless it is too large itself."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


GRADED = 4096  # tokens that are enough for gradients, of which a third of all batches is asked


class Moments:
    """All that is measured of one attention: sums over tokens, of which `mean` makes averages.

    `merged` key heads share their values, `joined` ones their keys. What has a gradient in it sums up fewer tokens.
    """

    def __init__(self, heads: Heads, merged: int, joined: int = 1, late: bool = False) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype)

        self.heads, self.merged, self.joined, self.late = heads, merged, joined, late
        self.tokens = self.graded = 0
        h, v, s, p = heads.heads, merged * heads.d_v, len(heads.still), len(heads.planes)
        self.out = zeros(h, v, v, dtype=torch.float32)  # of what a query head gathers of all merged values; it is large
        self.out_mean = zeros(h, v)
        self.out_gradient = zeros(h, heads.d_v, heads.d_v)  # with respect to its own
        self.query, self.query_gradient = zeros(h, s, s), zeros(h, joined * s, joined * s)  # still places
        if joined == 1:  # how the loss answers to stretching and turning each plane
            self.planes = zeros(heads.key_heads, heads.groups * 2 * p, heads.groups * 2 * p)
            return
        sets, d = heads.key_heads // joined, joined * heads.d_qk
        if late:  # keys before positions, and how positions turn them
            self.key, self.key_mean, self.key_gradient = zeros(sets, d, d), zeros(sets, d), zeros(sets, d, d)
            self.turns, self.sizes = zeros(1, p, dtype=torch.complex128), zeros(1, p)
            return
        self.planes = zeros(h, 2 * p * joined, 2 * p * joined, dtype=torch.float32)  # the same of all joined heads
        self.key, self.key_mean = zeros(sets, joined * s, joined * s), zeros(sets, joined * s)
        self.key_planes = zeros(sets, p, joined, joined, dtype=torch.complex128)
        self.query_planes = zeros(h, p)

    def add(self, query: Tensor, key: Tensor, out: Tensor) -> None:
        """What passed: the heads' own queries, all keys beside each other, and what was gathered."""
        query, key, out = (x.detach().float() for x in (query, key, out))
        self.check(query, key, out)
        self.tokens += out.shape[0] * out.shape[2]
        self.out += second(out)
        self.out_mean += out.sum((0, 2)).double().cpu()
        still = torch.tensor(self.heads.still, dtype=torch.long, device=query.device)
        self.query += second(query[..., still])
        if self.joined == 1 or self.late:
            return
        parts = key.unflatten(-1, (self.joined, -1))  # b sets t m d
        beside = parts[..., still].flatten(-2)
        ratio = query.shape[2] / key.shape[2]  # keys of another sequence count as much as queries do
        self.key += ratio * second(beside)
        self.key_mean += ratio * beside.sum((0, 2)).double().cpu()
        if self.heads.planes:
            turned = as_complex(parts, self.heads.planes)  # b sets t m P
            product = torch.einsum("bstmp,bstnp->spmn", turned, turned.conj())
            self.key_planes += ratio * product.to("cpu", torch.complex128)
            self.query_planes += as_complex(query, self.heads.planes).abs().pow(2).sum((0, 2)).double().cpu()

    def add_late(self, before: Tensor, after: Tensor) -> Tensor:
        """Keys before and after positions, (b, g, t, d). Returns by what factor each plane was turned, (t, P)."""
        beside = side_by_side(before.detach().float(), self.joined)
        self.check(beside)
        self.key += second(beside)
        self.key_mean += beside.sum((0, 2)).double().cpu()
        turns, sizes = turned_by(before.detach().double(), after.detach().double(), self.heads.planes)
        turns, sizes = turns.cpu(), sizes.cpu()
        if self.turns.shape != turns.shape:
            self.turns, self.sizes = torch.zeros_like(turns), torch.zeros_like(sizes)
        self.turns, self.sizes = self.turns + turns, self.sizes + sizes
        return turns / sizes.clamp(min=1e-300)

    def grade_late(self, gradient: Tensor, factor: Tensor) -> None:
        """Gradients with respect to the keys of all joined heads, (b, sets, t, m·d), after positions."""
        parts = gradient.float().unflatten(-1, (self.joined, -1))
        self.check(parts)
        self.key_gradient += second(
            turned_back(parts, factor.to(parts.device, torch.complex64), self.heads.planes).flatten(-2)
        )

    def grade(self, query: Tensor, out: Tensor, dq: Tensor | None, dout: Tensor | None) -> None:
        """How the loss answers. `dq` is with respect to all joined places, of which a query's own are not zero."""
        query = query.detach().float()
        wide = (*query.shape[:3], self.joined * self.heads.d_qk)
        dq = query.new_zeros(wide) if dq is None else dq.float()
        dout = torch.zeros_like(out, dtype=torch.float32) if dout is None else dout.float()
        self.check(dq, dout)
        self.graded += out.shape[0] * out.shape[2]
        self.out_gradient += second(own_values(dout, self.heads, self.merged))
        if self.late:
            return
        still = torch.tensor(self.heads.still, dtype=torch.long, device=query.device)
        self.query_gradient += second(dq.unflatten(-1, (self.joined, -1))[..., still].flatten(-2))
        if self.heads.planes and self.joined > 1:
            self.planes += second(answers(query, dq, self.heads.planes, self.joined))
        elif self.heads.planes:
            self.planes += second(along_and_across(query, dq, self.heads))

    def check(self, *found: Tensor) -> None:
        if not all(map(is_finite, found)):
            raise DeadweightError(
                f"{self.heads.path} has activations or gradients that are not finite on the calibration inputs; "
                "expected a model that works: nothing can be measured on this one"
            )

    def mean(self) -> Moments:
        """Averages, in float64."""
        if self.tokens == 0 or self.graded == 0:
            raise DeadweightError(
                f"{self.heads.path} was not reached by the calibration inputs; expected all heads to be used"
            )
        found = Moments(self.heads, self.merged, self.joined, self.late)
        found.tokens, found.graded = self.tokens, self.graded
        for name in ("out_gradient", "query_gradient", "key_gradient" if self.late else "planes"):
            setattr(found, name, getattr(self, name).double() / self.graded)
        more: tuple[str, ...] = () if self.joined == 1 else ("key", "key_mean")
        more += () if self.joined == 1 or self.late else ("key_planes", "query_planes")
        if self.late:
            found.turns, found.sizes = self.turns, self.sizes
        for name in ("out", "out_mean", "query", *more):
            sums = getattr(self, name)
            setattr(found, name, sums.to(torch.promote_types(sums.dtype, torch.float64)) / self.tokens)
        return found


def among_joined(query: Tensor, heads: Heads, joined: int) -> Tensor:
    """Queries, (b, h, t, d), as vectors that meet all joined keys, (b, h, t, joined·d): zero where they met none."""
    member = torch.arange(heads.heads, device=query.device) // heads.groups % joined
    here = torch.nn.functional.one_hot(member, joined).to(query)  # h joined
    return (query[:, :, :, None, :] * here[:, None, :, None]).flatten(3)


def own_values(out: Tensor, heads: Heads, merged: int) -> Tensor:
    """Of what each query head gathers, (b, h, t, merged·d), the part that is its own."""
    return own_places(out, heads, merged)


def own_places(states: Tensor, heads: Heads, merged: int) -> Tensor:
    parts = states.unflatten(-1, (merged, -1))
    member = torch.arange(heads.heads, device=states.device) // heads.groups % merged
    return parts[:, torch.arange(heads.heads, device=states.device), :, member].transpose(0, 1)


def along_and_across(q: Tensor, gradient: Tensor, heads: Heads) -> Tensor:
    """For each token and key head, how the loss answers to stretching and to turning each plane of each query head.

    Stretching plane (i, j) by 1 + a and turning it by the angle b changes q by a·q + b·Jq. The result is
    (b, g, t, groups·2·P).
    """
    i, j = (torch.tensor(side, device=q.device) for side in zip(*heads.planes, strict=True))
    along = q[..., i] * gradient[..., i] + q[..., j] * gradient[..., j]
    across = q[..., i] * gradient[..., j] - q[..., j] * gradient[..., i]
    both = torch.cat([along, across], -1)  # b h t 2P
    return both.unflatten(1, (heads.key_heads, heads.groups)).transpose(2, 3).flatten(3)


class Recorder:
    """Adds up what every attention is given and puts out in one run.

    If gradients are asked for, that waits until a block runs again: then it is kept until they are known. Unless blocks
    cannot run by themselves: then all is kept until the loss is known.
    """

    def __init__(self, known: dict[str, Moments], *, gradients: bool = False, whole: bool = False) -> None:
        self.known, self.gradients, self.whole = known, gradients, whole
        self.again = False  # a block runs again
        self.kept: list[tuple[str, Tensor, Tensor, Tensor]] = []
        self.layers: dict[str, Tensor] = {}  # outputs of those that make keys, where they are wanted before positions
        self.factors: dict[str, Tensor] = {}

    def __call__(
        self, path: str, query: Tensor, key: Tensor, value: Tensor, attend: Attend, how: dict[str, Any]
    ) -> Tensor:
        moments = self.known.get(path)
        if moments is None:  # not reached by the examples by which heads were located: it stays as it is
            return attend(query, key, value)
        if self.gradients and not self.whole and not self.again:
            if torch.is_grad_enabled():
                raise NotAloneError(f"{path}, which is not called by its block")
            return attend(query, key, value)
        if moments.late:
            self.factors[path] = moments.add_late(self.before_positions(moments.heads), key)
        wide = among_joined(query, moments.heads, moments.joined) if moments.joined > 1 else query
        key = side_by_side(key, moments.joined)
        if self.gradients and not wide.requires_grad:
            wide, key = wide.detach().requires_grad_(), key.detach().requires_grad_()
        out = attend(wide, key, side_by_side(value, moments.merged))
        moments.add(query, key, out)
        if self.gradients:
            self.kept.append((path, wide, key, out))
        return own_values(out, moments.heads, moments.merged)

    def answer(self, outputs: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
        """Gradients of what was kept, into the moments; those with respect to a block's inputs are returned."""
        kept, self.kept = self.kept, []
        late = [n for n, (path, *_) in enumerate(kept) if self.known[path].late]
        wanted = [t for _, query, _, out in kept for t in (query, out)]
        keys = [kept[n][2] for n in late]
        asked = [*inputs, *wanted, *keys]
        found = torch.autograd.grad(outputs, asked, given, allow_unused=True) if outputs else (None,) * len(asked)
        gradients = found[len(inputs) :]
        for n, (path, wide, _, out) in enumerate(kept):
            moments = self.known[path]
            query = own_places(wide, moments.heads, moments.joined)
            moments.grade(query, out, gradients[2 * n], gradients[2 * n + 1])
        for n, gradient in zip(late, gradients[len(wanted) :], strict=True):
            if gradient is not None:
                self.known[kept[n][0]].grade_late(gradient, self.factors[kept[n][0]])
        return list(found[: len(inputs)])

    def before_positions(self, heads: Heads) -> Tensor:
        """The keys as their layer made them, (b, g, t, d)."""
        assert heads.key is not None
        output, places = self.layers[heads.key.module], heads.key.places
        found = output[..., places.flatten()].unflatten(-1, places.shape) * heads.key.factor.to(output)
        return found.transpose(1, 2)

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Keeps what the layers put out that make keys to be turned late."""
        layers = {m.heads.key.module for m in self.known.values() if m.late and m.heads.key is not None}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, args, output: self.layers.__setitem__(name, output.detach())

        hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def measure(
    model: Any,
    found: dict[str, Any],
    batches: Sequence[dict[str, Tensor]],
    *,
    seed: int = 0,
    tick: Callable[[int], None] = lambda _: None,
    recorder: Any = Recorder,
    most: int = 3,
) -> dict[str, Any]:
    """The sums of every attention over all batches, by its path; `found` holds empty ones, and is returned.

    Where there are many tokens, one in `most` batches is asked for gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    every = max(1, min(most, sum(next(iter(b.values())).numel() for b in batches) // GRADED))
    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    try:
        whole = False
        for number, batch in enumerate(batches):
            if number % every == 0:
                whole = add_graded(model, found, batch, generator, recorder, whole)
            else:
                plain = recorder(found)
                with observing(model, plain), plain.watching(model), torch.no_grad():
                    called(model, batch, words=False)
            tick(number + 1)
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return found


def add_graded(
    model: Any, found: dict[str, Any], batch: dict[str, Tensor], generator: torch.Generator, make: Any, whole: bool
) -> bool:
    """One batch with gradients, block by block; or with a graph of all of it, if that must be. Returns which."""
    recorder = make(found, gradients=True, whole=whole)
    try:
        with ExitStack() as stack:
            stack.enter_context(observing(model, recorder))
            stack.enter_context(recorder.watching(model))
            go_back = None if whole else stack.enter_context(run_again(model, list(found), recorder))
            with torch.enable_grad():
                output = called(model, batch)
            loss = probe(output, generator)
            if go_back is None:
                recorder.answer([loss], [torch.ones_like(loss)], [])
            else:
                go_back(loss)
    except NotAloneError:
        return add_graded(model, found, batch, generator, make, True)
    return whole


def probe(output: Any, generator: torch.Generator) -> Tensor:
    """A scalar whose gradient's second moment is that of the divergence from the original.

    For logits: minus the log-probability of labels drawn from them. For other outputs: a random projection, scaled so
    that the squared gradient is the relative squared error.
    """
    found, is_logits = main_output(output)
    if is_logits:
        flat = found.flatten(0, -2).float()
        if not is_finite(flat.detach()):
            raise DeadweightError(
                "the model gives logits that are not finite on the calibration inputs; expected a model that works"
            )
        return F.cross_entropy(flat, drawn(flat.detach(), generator), reduction="sum")
    states = found.float()
    scale = states.detach().pow(2).sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
    noise = torch.randn(states.shape, generator=generator).to(states.device)
    return (states * noise / scale).sum()


def drawn(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One label for every row, by its probabilities, (rows, words) → (rows): where its sum passes a random number.

    In float64: rare words would fall together beside a sum near 1.
    """
    found = []
    for rows in logits.split(AT_A_TIME):
        sums = rows.softmax(-1).cumsum(-1, dtype=torch.float64)
        at = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64).to(sums.device) * sums[:, -1:]
        found.append(torch.searchsorted(sums, at, right=True).squeeze(1))
    return torch.cat(found).clamp(max=logits.shape[-1] - 1)
