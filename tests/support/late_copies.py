"""A transfer on the CPU whose copies run late, in another order, or torn: what a GPU's streams allow, and what they do not.

A copy runs when something waits for its end, or (``seed``) at random moments before that; until then its target has the old
bytes, and whoever frees or overwrites its source too early corrupts it. Copies of one direction run in their order, each
after the marks that it was told to come after, as on two streams; ``reorder`` and ``tear`` break those rules on purpose.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Sequence

from te_offload.offload.transfer import Copy, Mark, Piece


class Moment:
    """A mark of compute, which is over at once."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def is_over(self) -> bool:
        return True

    def wait(self) -> None: ...


class LateCopy:
    """The end of a copy that has not run yet."""

    def __init__(
        self, owner: LateTransfer, line: list[LateCopy], pieces: Sequence[Piece], after: Sequence[Mark]
    ) -> None:
        self.owner = owner
        self.line = line
        self.pieces = list(pieces)
        self.after = tuple(after)
        self.done = False
        self.seconds = 0.0

    def is_over(self) -> bool:
        self.owner.at_random()
        return self.done

    def wait(self) -> None:
        """Run everything before it, and it."""
        while not self.done:
            first = self if self.owner.reorder else next(copy for copy in self.line if not copy.done)
            first.run()

    def run(self) -> None:
        if not self.owner.reorder:
            for mark in self.after:
                mark.wait()
        for number, (source, target, nbytes) in enumerate(self.pieces):
            there = nbytes // 2 if self.owner.tear and number == 0 else nbytes
            missing = ctypes.string_at(source + there, nbytes - there)
            ctypes.memmove(target, source, there)
            ctypes.memmove(target + there, bytes((byte + 1) % 256 for byte in missing), len(missing))
        self.done = True
        self.seconds = time.perf_counter()


class LateTransfer:
    """See the module.

    Args:
        seed: of the random moments; ``None``: copies run only when something waits for them.
        reorder: a copy runs without those before it, and without what it was told to come after.
        tear: a copy leaves out half of its first piece. Other bytes stand there then: what was there could by chance be
            the right ones, where memory is used again.
    """

    def __init__(self, seed: int | None = None, *, reorder: bool = False, tear: bool = False) -> None:
        self.timed = True
        self.random = None if seed is None else random.Random(seed)
        self.reorder = reorder
        self.tear = tear
        self.out: list[LateCopy] = []
        self.back: list[LateCopy] = []

    def mark(self) -> Mark:
        self.at_random()
        return Moment()

    def copy_out(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        return self._start(self.out, pieces, after)

    def copy_back(self, pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        return self._start(self.back, pieces, after)

    def _start(self, line: list[LateCopy], pieces: Sequence[Piece], after: tuple[Mark, ...]) -> Copy:
        copy = LateCopy(self, line, pieces, after)
        line.append(copy)
        return Copy(Moment(), copy)

    def block_compute(self, mark: Mark) -> None:
        mark.wait()

    def milliseconds(self, first: Mark, second: Mark) -> float:
        return float(1e3 * (second.seconds - first.seconds))  # type: ignore[attr-defined]

    def at_random(self) -> None:
        """Perhaps let the next copy of one direction run."""
        if self.random is not None and self.random.random() < 0.3:
            line = self.random.choice((self.out, self.back))
            waiting = [copy for copy in line if not copy.done]
            if waiting and all(mark.is_over() for mark in waiting[0].after):
                waiting[0].run()
