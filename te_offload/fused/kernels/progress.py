"""A line for whoever waits for a kernel to be compiled.

In: a text. Out: one warning in the log ``te_offload``, which Python shows by default. Keeps true: what is quick says
nothing. Does not: know what takes so long.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_LOG = logging.getLogger("te_offload")
PATIENCE = 1.0  # seconds; a kernel that is on disk takes some milliseconds


@contextlib.contextmanager
def said_if_slow(text: str, seconds: float = PATIENCE) -> Iterator[threading.Timer]:
    """Say ``text`` if what is inside takes longer than some seconds."""
    timer = threading.Timer(seconds, _LOG.warning, args=(text,))
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()
