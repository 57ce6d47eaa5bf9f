"""Numbers as people read them: 1.23 MB, 2.45x, 3 min 05 s."""

import math

__all__ = ["count", "nbytes", "number", "ratio", "seconds"]

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNT_UNITS = ("", "k", "M", "G", "T")
NONE = "–"


def nbytes(value: float | None) -> str:
    """Return bytes in decimal units with three significant digits, "1.23 MB"."""
    if value is None:
        return NONE
    scaled, unit = _scale(value, _BYTE_UNITS)
    return f"{scaled} {unit}"


def count(value: float | None) -> str:
    """Return a count, in full below ten thousand ("9,812") and with a unit above ("1.23 M")."""
    if value is None:
        return NONE
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    scaled, unit = _scale(value, _COUNT_UNITS)
    return f"{scaled} {unit}".rstrip()


def number(value: object, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, "1.234", "3.00e-4"."""
    if not isinstance(value, int | float):
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        # The exponent after rounding: 0.9996 has three digits as 1.00.
        exponent = int(f"{abs(value):.{digits - 1}e}".split("e")[1])
        decimals = max(digits - 1 - exponent, 0)
        return f"{value:,.{decimals}f}"
    mantissa, power = f"{value:.{max(digits - 2, 1)}e}".split("e")
    return f"{mantissa}e{int(power)}"


def ratio(value: float | None) -> str:
    """Return a ratio with three significant digits, "2.45x"."""
    return NONE if value is None else f"{number(value, 3)}x"


def seconds(value: float | None) -> str:
    """Return a duration, "820 µs", "41.2 ms", "3.21 s", "3 min 05 s", "2 h 07 min"."""
    if value is None:
        return NONE
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{number(value * 1e3, 3)} ms"
    if value < 60:
        return f"{number(value, 3)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def _scale(value: float, units: tuple[str, ...]) -> tuple[str, str]:
    exponent = 0
    # 999.5 would round to 1000 in the smaller unit.
    while abs(value) >= 999.5 and exponent < len(units) - 1:
        value /= 1000
        exponent += 1
    if exponent == 0:
        return f"{value:.0f}", units[0]
    return number(value, 3), units[exponent]
