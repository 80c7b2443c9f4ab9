"""Text that is safe to print, whatever the names in a checkpoint are."""

from __future__ import annotations

import re
import unicodedata

# Control, format (bidirectional overrides, zero width), surrogate, and line or paragraph separator characters.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    """The same text with every control character written as its escape: ESC becomes `\\x1b`.

    Markup needs no escaping: reports pass the result to rich as `Text`, which is not parsed.
    """
    if text.isprintable():  # nothing to escape, which is nearly always so
        return text
    return "".join(_escape(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


def one_line(text: str) -> str:
    """`printable`, with line breaks and runs of blanks first joined into single spaces."""
    return printable(" ".join(text.split()))


def wrap_name(name: str, width: int) -> list[str]:
    """A parameter name in lines of at most `width`, broken before a dot or a bracket rather than inside a word."""
    lines = [""]
    for part in re.findall(r"^[^.\[]+|[.\[][^.\[]*", name) or [name]:
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        while len(lines[-1]) + len(part) > width > 2:
            cut = width - len(lines[-1])
            lines[-1], part = lines[-1] + part[:cut], part[cut:]
            lines.append("  ")
        lines[-1] += part
    return lines


def count(n: int) -> str:
    return f"{n:,}"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def file_size(n_bytes: int, decimals: int) -> str:
    """In megabytes; a small file in kilobytes, so that it is not 0.00 MB."""
    size, unit = (1e6, "MB") if n_bytes >= 100_000 else (1e3, "kB")
    return f"{n_bytes / size:,.{decimals}f} {unit}"


def percent(part: int, whole: int) -> str:
    """A share with two significant digits, down to a thousandth of a percent."""
    if part == 0 or whole == 0:
        return "0 %"
    share = 100 * part / whole
    decimals = next((n for n, least in enumerate((10, 1, 0.1, 0.01)) if share >= least), 4)
    return f"{share:.{decimals}f} %" if share >= 0.001 else "<0.001 %"


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
