"""The kernel for one token is the attention that is spelled out: on a GPU, or run by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deadweight
from deadweight.slim import attention as slim_attention
from deadweight.slim.attention import Packing

START = """
import sys, torch
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter takes the bits of bfloat16 for a number
if not CUDA:
    import triton.runtime.interpreter as inside
    original = inside._patch_lang_tensor
    def patched(tensor, scope):  # numpy 2.4 makes no number of an array that holds one
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
    inside._patch_lang_tensor = patched
from deadweight.slim import attention as slim_attention
from deadweight.slim.attention import Packing, spelled_out
from deadweight.slim.kernels import Plan, decode, decoded, evenly
torch.manual_seed(0)
torch.set_num_threads(1)
"""

KERNEL = (
    START
    + """
def caches(keys, values, t, dtype):
    apart = len(keys) == len(values) and len(set(keys)) == len(set(values)) == 1
    shapes = [(2, len(sizes), t, sizes[0]) if apart else (2, 1, t, sum(sizes)) for sizes in (keys, values)]
    return [torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes]

def mask_of(kind, t):
    token = torch.arange(t, device=DEVICE)
    some = token < max(1, t // 2)
    masks = {
        "filled": some[None].expand(2, -1),
        "left": token[None] >= torch.tensor([[0], [t // 3]], device=DEVICE),
        "holes": (token[None] % 3 > 0) | (token == 0),
        "added": torch.randn(2, t, device=DEVICE).where(some, torch.finfo(torch.float32).min),
        "infinite": torch.randn(2, t, device=DEVICE).where(some, -torch.inf),
    }
    return None if kind is None else masks[kind][:, None, None]

def one(states, sizes, i):
    return states[:, i] if states.shape[1] == len(sizes) else states[:, 0].split(list(sizes), -1)[i]

def exact(query, key, value, mask, places, late, keys, values, scaling):
    found = torch.zeros(2, query.shape[1], 1, max(values), dtype=torch.double, device=DEVICE)
    for h in range(query.shape[1]):
        i, j = h * len(keys) // query.shape[1], h * len(values) // query.shape[1]
        start = sum(keys[:i])
        at = torch.arange(keys[i], device=DEVICE) if places is None else places[start : start + keys[i]].long()
        q, k, v = (x.double()[:, None] for x in (query[:, h, :, at], one(key, keys, i), one(value, values, j)))
        m = mask.double() if mask is not None and mask.dtype != torch.bool else mask
        found[:, h, :, : values[j]] = spelled_out(q, k, v, m, scaling, False, 0.0, None)[:, 0]
    return found

CASES = [  # query heads, keys, values, size of a query, places chosen, mask
    (9, (32, 32, 32), (96,), 64, False, None),  # three key heads share their values
    (9, (20, 44, 12), (84,), 64, True, "filled"),
    (8, (16, 16), (24, 24), 32, False, "left"),
    (8, (4, 8), (6, 10), 16, True, "added"),
    (8, (40,), (16, 16), 64, False, "infinite"),  # keys are shared by more heads than values
    (3, (5, 3, 7), (3, 5, 7), 8, False, "holes"),
    (16, (8, 24), (40, 36), 64, False, "filled"),
]
for heads, keys, values, size, chosen, kind in CASES:
    for dtype, near in ((torch.float32, 1e-5), (HALF, 0.02)):  # weights are rounded before they meet values
        for t, parts in ((1, 1), (70, 1), (70, 3), (136, 3)):
            query = torch.randn(2, heads, 1, size, dtype=dtype, device=DEVICE)
            key, value = caches(keys, values, t, dtype)
            order = [torch.randperm(size, device=DEVICE)[:k].sort().values for k in keys]
            places = torch.cat(order).int() if chosen else None
            mask = mask_of(kind, t)
            rest = (places, [], keys, values, 0.3)
            found = decoded(query, key, value, mask, *rest, Plan(32, 4, 2, parts))
            wanted = exact(query, key, value, mask, *rest)
            error = float((found - wanted).abs().max())
            assert error < near, (heads, keys, values, chosen, kind, dtype, t, parts, error)
            shares = heads // len(values)  # and the way back from merged values, for sizes that are no powers of two
            ups = [torch.randn(shares, 20, v, dtype=dtype, device=DEVICE) / v**0.5 for v in values]
            risen = decoded(query, key, value, mask, *rest, Plan(32, 4, 2, parts), ups)
            own = [w[..., :v] for w, v in zip(wanted.split(shares, 1), values)]
            back = torch.cat([torch.einsum("bhtr,hdr->bhtd", w, u.double()) for w, u in zip(own, ups)], 1)
            error = float((risen - back).abs().max())
            assert risen.shape == back.shape and error < 3 * near, (heads, values, dtype, t, parts, error)
            many = decoded(query, key, value, mask, *rest, Plan(32, 4, 2, 17), ups)  # joined before
            assert float((many - back).abs().max()) < 3 * near
            wrong = torch.cat([torch.einsum("bhtr,hdr->bhtd", w, u.double().flip(0)) for w, u in zip(own, ups)], 1)
            assert shares == 1 or float((risen - wrong).abs().max()) > 10 * error
    assert torch.allclose(decode(query, key, value, mask, *rest, []).double(), wanted, atol=near)
    other = torch.ones(1, 1, 1, t, dtype=torch.bool, device=DEVICE)
    other[..., 5:9] = False  # a mask that hides other tokens gives something else
    changed = decoded(query, key, value, other, *rest, Plan(32, 4, 2, 3))
    assert float((changed - wanted).abs().max()) > 2 * near

# What no mask shows is not read: it may be anything.
query, key, value = (torch.randn(1, 2, t, 16, device=DEVICE) for t in (1, 200, 200))
mask = torch.zeros(1, 1, 1, 200, dtype=torch.bool, device=DEVICE)
mask[..., 40:120] = True
rest = (None, [], (16, 16), (16, 16), 0.3)
wanted = decoded(query, key[:, :, 40:120], value[:, :, 40:120], None, *rest, Plan(32, 4, 2, 1))
for z in (key, value):
    z[:, :, :40] = z[:, :, 120:] = torch.nan
found = decoded(query, key, value, mask, *rest, Plan(32, 4, 2, 2))
assert torch.allclose(found, wanted, atol=1e-6)
# However many rows there are, the last programs are not alone: nine tenths of the places are taken to the end.
for rows in range(1, 600):
    parts = evenly(rows, 264, max(1, 264 // rows))
    assert 1 <= parts <= 4 * max(1, 264 // rows)
    assert rows * parts >= 0.9 * 264 * -(-rows * parts // 264) or parts == max(1, 264 // rows), (rows, parts)
assert evenly(96, 264, 2) == 5 and evenly(64, 264, 4) == 4

nothing = decoded(query, key, value, mask & False, *rest, Plan(32, 4, 2, 2))
assert not nothing.any()
"""
)

PACKED = (
    START
    + """
slim_attention.DEVICES = (DEVICE,)
calls = 0
def counted(*args):
    global calls
    calls += 1
    return decode(*args)
slim_attention.decode = counted
CASES = [  # key heads that share values, that share keys; and what is kept
    (1, 1, (4, 4), (6, 6)),
    (1, 1, (4, 6), (3, 8)),
    (2, 1, (4, 8), (10,)),
    (2, 1, (6, 6, 2, 4), (5, 9)),
    (2, 2, (6,), (10,)),
    (2, 2, (10, 4), (5, 9)),
    (1, 2, (10, 4), (5, 5, 5, 5)),
]
for merged, joined, keys, values in CASES:
    n = joined * len(keys)
    spec = {"heads": 2 * n, "key_heads": n, "merged": merged, "joined": joined, "d_qk": 8, "d_v": 8, "keys": keys}
    planes = [k // 2 for k in keys] if joined > 1 else []
    spec |= {"values": values, "planes": planes, "chosen": True, "needed": True}
    packing = Packing(spec).to(DEVICE).requires_grad_(False)
    packing.key_places[:] = torch.cat([torch.randperm(8 * joined)[:k].sort().values for k in keys]).int()
    if joined > 1:
        packing.query_places[:] = torch.randint(0, 8, packing.query_places.shape).int()
    for up in packing.parameters():
        torch.nn.init.normal_(up)
    whole = [torch.randn(3, m, t, 8, device=DEVICE) for m, t in ((2 * n, 1), (n, 21), (n, 21))]
    mask = (torch.arange(21, device=DEVICE) > torch.tensor([[-1], [3], [12]], device=DEVICE))[:, None, None]
    how = {"scaling": 0.3, "causal": False, "dropout": 0.0, "softcap": None}
    for seen in (None, mask):
        before = calls
        found = packing.attend(whole[0], *packing.packed(*whole[1:]), mask=seen, **how)
        assert calls == before + 1 and found.shape == (3, 2 * n, 1, 8)
        packing.double()
        query, key, value = (z.double() for z in whole)  # the kernel is not for these
        wanted = packing.attend(query, *packing.packed(key, value), mask=seen, **how)
        packing.float()
        assert calls == before + 1 and torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-4)

LATE = [  # key heads that share values, that share keys; what is kept; how many of the four planes turn
    (2, 2, (10,), (7,), 4),
    (2, 2, (24, 9), (10, 10), 4),
    (3, 3, (40,), (12,), 4),
    (2, 2, (12, 16), (9, 16), 3),
    (4, 2, (12, 5), (9,), 4),  # several sets of keys to one of values: not for the kernel
]
for merged, joined, keys, values, turned in LATE:
    n = joined * len(keys)
    spec = {"heads": 2 * n, "key_heads": n, "merged": merged, "joined": joined, "d_qk": 8, "d_v": 8, "keys": keys}
    spec |= {"values": values, "planes": [], "chosen": False, "needed": True, "late": turned}
    packing = Packing(spec).to(DEVICE).requires_grad_(False)
    order = torch.randperm(8)
    packing.plane_places[:] = order[: 2 * turned].int()
    if turned < 4:
        packing.still_places[:] = order[2 * turned :].int()
    packing.rates[:] = torch.logspace(0, -2, turned).view(torch.int32)
    for parameter in packing.parameters():
        torch.nn.init.normal_(parameter)
    query = torch.randn(3, 2 * n, 1, 8, device=DEVICE)
    shapes = [(3, len(x), 150, x[0]) if packing.apart else (3, 1, 150, sum(x)) for x in (keys, values)]
    key, value = (torch.randn(shape, device=DEVICE) for shape in shapes)
    packing.first = torch.tensor([[0], [3000], [70]], device=DEVICE)
    mask = (torch.arange(150, device=DEVICE) > torch.tensor([[-1], [3], [70]], device=DEVICE))[:, None, None]
    for seen in (None, mask):
        before = calls
        found = packing.attend(query, key, value, mask=seen, **how)
        assert calls == before + (merged == joined) and found.shape == (3, 2 * n, 1, 8)
        packing.double()
        wanted = packing.attend(query.double(), key.double(), value.double(), mask=seen, **how)
        packing.float()
        assert torch.allclose(found.double(), wanted, rtol=1e-3, atol=1e-3), (merged, joined, keys, turned)
        packing.first += 1
        assert not torch.allclose(packing.attend(query, key, value, mask=seen, **how), found, atol=1e-2)
        packing.first -= 1
    if merged == joined:
        halves = [z.to(HALF) for z in (query, key, value)]
        found = packing.to(HALF).attend(*halves, mask=None, **how).double()
        wanted = packing.double().attend(*(z.double() for z in halves), mask=None, **how)
        assert float((found - wanted).norm()) < 0.03 * float(wanted.norm()), float((found - wanted).norm())

import deadweight
model = deadweight.load(sys.argv[1]).to(DEVICE)
ids = torch.tensor([list(b"The function returns ")], device=DEVICE)
options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
slim_attention.DEVICES = ()
wanted = model.generate(ids, **options)
before = calls
slim_attention.DEVICES = (DEVICE,)
assert torch.equal(model.generate(ids, **options), wanted) and calls > before
before = calls
assert torch.equal(model.generate(ids, cache_implementation="static", **options), wanted)
assert CUDA or calls > before  # compiled, the calls are not counted
padded = torch.cat([torch.zeros(1, 3, dtype=torch.long, device=DEVICE), ids], 1)
mask = (torch.arange(padded.shape[1], device=DEVICE) >= 3).long()[None]
assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], wanted)
"""
)

ELSEWHERE = """
import sys
sys.modules["deadweight"] = None  # importing it fails, as where it is not installed
if sys.argv[2] == "without":
    sys.modules["triton"] = None
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
code = sys.modules[type(model).__module__.rpartition(".")[0] + ".deadweight_attention"]
assert (code.decode is None) == (sys.argv[2] == "without"), code.decode
model.generate(torch.tensor([list(b"The function returns ")]), max_new_tokens=3, do_sample=False, pad_token_id=0)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decode") / "small"
    deadweight.compress("demo", folder, cache="low-rank", keep_kv=0.5, windows=8, length=64)
    return folder


def passes(code: str, *args: str, **environment: str) -> None:
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def interpreted() -> dict[str, str]:
    return {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}


@pytest.mark.slow
def test_the_kernel_is_the_attention_that_is_spelled_out_for_all_layouts_and_masks() -> None:
    pytest.importorskip("triton")
    passes(KERNEL, **interpreted())


def test_packed_heads_and_whole_models_give_the_same_with_the_kernel(small: Path) -> None:
    pytest.importorskip("triton")
    passes(PACKED, str(small), **interpreted())


@pytest.mark.parametrize("triton", ["with", "without"])
def test_the_kernel_travels_with_the_checkpoint_and_is_not_needed_there(
    small: Path, tmp_path: Path, triton: str
) -> None:
    if triton == "with":
        pytest.importorskip("triton")
    ours = Path(slim_attention.__file__).parent
    assert (small / "deadweight_kernels.py").read_bytes() == (ours / "kernels.py").read_bytes()
    passes(ELSEWHERE, str(small), triton, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")


def test_a_cpu_takes_the_attention_that_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(slim_attention, "decode", refused)
    monkeypatch.setattr(slim_attention, "gathers", lambda *args: True, raising=False)
    spec = {"heads": 2, "key_heads": 2, "merged": 1, "d_qk": 4, "d_v": 4, "keys": [2, 4], "values": [3, 3]}
    packing = Packing({**spec, "chosen": False, "needed": True})
    query, key, value = (torch.randn(1, 2, t, 4) for t in (1, 5, 5))
    how = {"mask": None, "scaling": 0.5, "causal": False, "dropout": 0.0, "softcap": None}
    assert packing.attend(query, *packing.packed(key, value), **how).shape == (1, 2, 1, 4)
    monkeypatch.setattr(slim_attention, "DEVICES", ("cpu",))
    with pytest.raises(AssertionError, match="the kernel was asked"):
        packing.attend(query, *packing.packed(key, value), **how)
    packing.attend(query, *packing.packed(key, value), **how | {"softcap": 9.0})
    packing.attend(query.requires_grad_(), *packing.packed(key, value), **how)


def test_the_kernel_does_not_take_what_is_trained_of_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values may be frozen while the packing learns."""
    given: list[int] = []

    def counted(query: torch.Tensor, *args: Any) -> torch.Tensor:
        given.append(len(args[-1]))
        return query.new_ones(1, 2, 1, 4 if args[-1] else max(args[-3]))

    monkeypatch.setattr(slim_attention, "decode", counted)
    monkeypatch.setattr(slim_attention, "gathers", lambda *args: True, raising=False)
    monkeypatch.setattr(slim_attention, "DEVICES", ("cpu",))
    spec = {"heads": 2, "key_heads": 2, "merged": 2, "d_qk": 4, "d_v": 4, "keys": [4, 4], "values": [3]}
    packing = Packing({**spec, "chosen": False, "needed": True})
    torch.nn.init.normal_(packing.get_parameter("up_0"))
    query, key, value = (torch.randn(1, 2, t, 4) for t in (1, 5, 5))
    how = {"mask": None, "scaling": 0.5, "causal": False, "dropout": 0.0, "softcap": None}
    packing.attend(query, *packing.packed(key, value), **how).sum().backward()
    assert given == [0] and packing.get_parameter("up_0").grad is not None  # what was gathered goes back by itself
    with torch.no_grad():
        packing.attend(query, *packing.packed(key, value), **how)
    assert given == [0, 1]
