"""Amounts of resources: compared by value, multiplied without changing how they are written."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?P<suffix>[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?"
)
_FACTORS: dict[str, Decimal] = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{name: Decimal(10) ** (3 * power) for power, name in enumerate("kMGTPE", 1)},
    **{f"{name}i": Decimal(2) ** (10 * power) for power, name in enumerate("KMGTPE", 1)},
}


def value(text: object) -> Decimal:
    """
    Return the value of a quantity as the API writes it: text or a number.

    Raises:
        ValueError: it is none.
    """
    match = _FORM.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    suffix = match["suffix"] or ""
    factor = _FACTORS.get(suffix)
    if factor is None:
        factor = Decimal(10) ** int(suffix[1:])
    return Decimal(match["number"]) * factor


def times(text: str, number: int) -> str:
    """Return *text* multiplied by *number*, in the same unit. Raises ValueError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    product = Decimal(match["number"]) * number
    return f"{product.normalize():f}{match['suffix'] or ''}"
