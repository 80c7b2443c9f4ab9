"""Text that is safe and pleasant to print, whatever a checkpoint calls its parameters."""

from __future__ import annotations

import unicodedata

# Control, format (bidirectional overrides, zero width), surrogate, and line or paragraph separator characters.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    """The same text with every character that could steer a terminal written as its escape: ESC becomes `\\x1b`.

    Markup needs no escaping on top: reports hand the result to rich as `Text`, which is never parsed.
    """
    return "".join(_escape(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


def one_line(text: str) -> str:
    """`printable`, with line breaks and runs of blanks first joined into single spaces."""
    return printable(" ".join(text.split()))


def count(n: int) -> str:
    return f"{n:,}"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def percent(part: int, whole: int) -> str:
    """A share with as many digits as it takes to tell it from zero, down to a hundredth of a percent."""
    if part == 0 or whole == 0:
        return "0 %" if whole else "n/a"
    share = 100 * part / whole
    if share < 0.01:
        return "<0.01 %"
    return f"{share:.2f} %" if share < 1 else f"{share:.1f} %"


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
