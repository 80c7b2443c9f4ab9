"""The options of `compress`: their defaults, and the errors for values that do not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from deadweight.compress.calibration import CalibrationRequest
from deadweight.errors import DeadweightError

HEAD_RATE, CACHE_RATE = 2e-4, 3e-5  # learning rates of healing: smaller heads, coded caches
USUAL_CACHE = 0.25  # share of a 16-bit cache, by default
USUAL_ATTENTION = 0.75  # share of the attention weights, by default
CURVE_SHARES = (
    0.08,
    0.1,
    0.125,
    0.16,
    0.19,
    0.22,
    0.25,
    0.31,
    0.375,
    0.44,
    0.53,
)  # of --curve and --max-loss
LARGEST = 8 / 16  # share of a 16-bit cache that 8-bit codes take: more bits are never needed
Structure = Literal["joint", "all", "head", "half", "block", "pair", "scale"]  # what one transform mixes
STRUCTURES: tuple[Structure, ...] = ("joint", "all", "head", "half", "block", "pair", "scale")
EXPECTED = "expected one of keep_kv, bits, keep_attention and max_loss"


@dataclass(frozen=True)
class Settings:
    """The options of `compress`; the command has the same ones.

    One of `keep_kv` (share of a 16-bit cache, everything included), `bits` (per number of the cache: 16 times the
    share), `keep_attention` (share of the attention weights) and `max_loss` (nats per token) says how small.
    """

    keep_kv: float | None = None
    bits: float | None = None
    keep_attention: float | None = None
    max_loss: float | None = None
    keys: Structure | None = None  # what one transform mixes; None: as much as decodes fast
    text: str | None = None
    judge_text: str | None = None
    inputs: Any = None
    layout: Literal["slim", "stock"] = "slim"
    method: Literal["knapsack", "layer", "uniform"] = "knapsack"
    windows: int = 32
    length: int | None = None
    batch: int | None = None
    step: int | None = None
    heal: int = 0
    heal_text: str | None = None
    heal_rate: float | None = None  # None: HEAD_RATE or CACHE_RATE
    heal_tokens: int | None = None  # None: one batch; for a coded cache on a GPU many
    curve: bool = False
    device: str | None = None
    overwrite: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        expect_choice("layout", self.layout, ("slim", "stock"))
        expect_choice("method", self.method, ("knapsack", "layer", "uniform"))
        if self.keys is not None:
            expect_choice("keys", self.keys, STRUCTURES)
        budgets = (self.keep_kv, self.bits, self.keep_attention, self.max_loss)
        if sum(x is not None for x in budgets) > 1:
            raise DeadweightError(f"found several budgets; {EXPECTED}")
        for name, share in (("keep-kv", self.keep_kv), ("keep-attention", self.keep_attention)):
            if share is not None and not 0 < share <= 1:
                raise DeadweightError(f"found --{name} {share}; expected a share above 0 and at most 1")
        if self.bits is not None and not 0 < self.bits <= 16:
            raise DeadweightError(f"found --bits {self.bits}; expected bits per number, above 0 and at most 16")
        if self.max_loss is not None and not self.max_loss > 0:
            raise DeadweightError(
                f"found --max-loss {self.max_loss}; expected nats per token above 0: 0.02 is 2 % of perplexity"
            )
        for name, count in (("--batch", self.batch), ("--step", self.step)):
            if count is not None and count < 1:
                raise DeadweightError(f"found {name} {count}; expected 1 or more")
        if self.heal < 0:
            raise DeadweightError(f"found --heal {self.heal}; expected a number of steps, or 0")
        if self.heal_rate is not None and not 0 < self.heal_rate < 1:
            raise DeadweightError(f"found --heal-rate {self.heal_rate}; expected a learning rate, such as {CACHE_RATE}")
        if self.heal_tokens is not None and self.heal_tokens < 1:
            raise DeadweightError(f"found --heal-tokens {self.heal_tokens}; expected a number of tokens per step")
        if self.heal_text is not None and not self.heal:
            raise DeadweightError("found --heal-text without --heal; expected --heal STEPS")
        if self.judge_text is not None and self.judge_text in (self.text, self.heal_text):
            raise DeadweightError(
                f"found {self.judge_text!r} both as training and as judge text; expected another --judge-text"
            )
        self.refuse_cache_options()

    def refuse_cache_options(self) -> None:
        """Raise if an option for coded caches is combined with smaller heads."""
        about_caches = {
            "--keep-kv": self.keep_kv is not None,
            "--bits": self.bits is not None,
            "--max-loss": self.max_loss is not None,
            "--curve": self.curve,
            "--keys": self.keys is not None,
            "--judge-text": self.judge_text is not None,
        }
        given = next((name for name, is_given in about_caches.items() if is_given), None)
        if given is None:
            return
        if not self.wants_heads:
            self.refuse_head_options()
        if self.layout == "stock":
            raise DeadweightError(
                f"found {given} with --layout stock, in which no cache can be coded; expected --keep-attention, or "
                "--layout slim"
            )
        if self.keep_attention is not None:
            raise DeadweightError(f"found {given}, an option for coded caches; expected it without --keep-attention")

    def refuse_head_options(self) -> None:
        """Raise if an option for smaller heads is given for a coded cache, which would ignore it."""
        for name, is_given in (("--method", self.method != "knapsack"), ("--step", self.step is not None)):
            if is_given:
                raise DeadweightError(
                    f"found {name}, an option for smaller heads; expected it with --keep-attention: bits of a cache "
                    "are allotted in one way only"
                )

    @property
    def wants_heads(self) -> bool:
        """Whether smaller heads are requested explicitly."""
        return self.keep_attention is not None or self.layout == "stock"

    @property
    def wants_cache(self) -> bool:
        """Whether a smaller cache is requested explicitly."""
        return self.share is not None or self.max_loss is not None or self.curve

    @property
    def calibration(self) -> CalibrationRequest:
        return CalibrationRequest(self.text, self.inputs, self.windows, self.length, self.batch)

    @property
    def share(self) -> float | None:
        """The requested share of a 16-bit cache."""
        return self.keep_kv if self.bits is None else self.bits / 16


def expect_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DeadweightError(f"found {name}={value!r}; expected {' or '.join(map(repr, allowed))}")
