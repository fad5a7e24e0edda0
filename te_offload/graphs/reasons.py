"""Exceptions that are kept as reasons: with the text of their traceback, without its frames.

In: an exception that was caught. Out: the same one, which holds no variable of the code that raised it. Keeps true: its
causes too. Does not: swallow it.

Clearing frames is not enough: closures of their functions, and frames that still run, hold what lies in a graph's memory.
"""

from __future__ import annotations

import traceback


def without_frames(error: BaseException) -> BaseException:
    """Let go of the variables of the code that raised it; its traceback is a note from now on (Python 3.11 and later)."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    one: BaseException | None = error
    while one is not None:
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
        one = one.__cause__ or one.__context__
    if hasattr(error, "add_note"):
        error.add_note(f"It was raised here:\n{text}")
    return error
