"""Exceptions that are kept as reasons: with the text of their traceback, without its frames, and with what to do.

In: an exception that was caught. Out: the same one, which holds no variable of the code that raised it, or one that says
more, of which it is the cause. Keeps true: its causes too. Does not: swallow it.

Clearing frames is not enough: closures of their functions, and frames that still run, hold what lies in a graph's memory.
"""

from __future__ import annotations

import traceback

from te_offload.errors import CaptureError


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


def waits_for_another_stream(error: BaseException) -> bool:
    """Whether a capture failed since something in it would have waited for a stream that is no part of it."""
    return any(text in str(error) for text in ("legacy stream depend", "uncaptured work in another stream"))


def explained(error: Exception) -> Exception:
    """An error that says what to do where torch's does not; else the same one."""
    if not waits_for_another_stream(error):
        return error
    found = CaptureError(
        "It would wait for another stream, which no capture may. As a rule an autograd graph over its parameters is alive "
        "that was made on the default stream: of an earlier step, whose loss, say, is kept (delete that, or capture from "
        "the first step on), or held by data parallelism (make its wrapper inside torch.cuda.stream of another stream)."
    )
    found.__cause__ = error
    return found
