"""Bytes to text and back.

In: a number of bytes, or text such as "256MiB". Out: the other of the two. Keeps true: binary units (1 KiB = 1024
bytes) and whole bytes. Does not: guess a unit that is not written.
"""

from __future__ import annotations

import re

from te_offload.errors import ArgumentError, ArgumentTypeError

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: int | str, name: str) -> int:
    """Whole bytes from a number or from text with a unit.

    Args:
        value: bytes as an int, or text such as ``"256MiB"``, ``"1.5 GiB"``, ``"4096"``.
        name: the argument's name, for the error.

    Raises:
        ArgumentTypeError: ``value`` is neither an int nor text.
        ArgumentError: the text is no size, or the size is negative.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ArgumentTypeError(
            f'{name} must be a number of bytes or text such as "256MiB", but is {value!r} ({type(value).__name__}).'
        )
    if isinstance(value, int):
        if value < 0:
            raise ArgumentError(f"{name} must not be negative, but is {value} bytes.")
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ArgumentError(f'{name} must be a size such as "256MiB", but is {value!r}.')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(nbytes: int) -> str:
    """Bytes as text with a binary unit, one decimal from KiB on: ``format_bytes(1536) == "1.5 KiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: GiB ends the loop")
