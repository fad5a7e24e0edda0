"""Whether split sizes fit the rows that they split, in a CUDA graph, where no host reads them.

In: split sizes that grouped linears were given while a graph was being captured. Out: nodes of that graph that note by how
many rows they asked for too much, and split sizes cut to the rows. Keeps true: nothing waits for the device; a replay that
asked for too much is told of, and once, however far the host is ahead; a backward reads the sizes that its forward computed
with. Does not: look at calls outside of a capture, or at split sizes on the host, which are checked where they are read.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_offload.errors import CaptureError, RowOverflowError

_CURRENT: contextvars.ContextVar[RowCheck | None] = contextvars.ContextVar("te_offload_row_check", default=None)


class RowCheck:
    """Notes, while a graph is captured, rows that are asked for and are not there.

    A place is a call of a grouped linear, or several with the same split sizes.

    Args:
        device: of the graphs. most: places there may be.

    Attributes:
        places: what each place is, for messages. device: see above.
    """

    def __init__(self, device: torch.device, most: int = 4096) -> None:
        self.places: list[str] = []
        self.device = device
        # Of each place the most rows that were missing, then in how many replays some were. Both only grow, so that a
        # replay that was queued before the host looked tells nothing twice.
        self._state = torch.zeros(2 * most, dtype=torch.int64, device=device)
        self._told = torch.zeros(2 * most, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._known: list[int] = []
        self._seen = memoryview(self._told.numpy())  # type: ignore[arg-type]  # which the host reads before each replay
        self._excess: list[torch.Tensor] = []
        self._noted: dict[tuple[int, int, int], torch.Tensor] = {}
        self._cut: dict[tuple[int, int, int], torch.Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What runs inside is captured; at the end the graph sends what it noted to the host. Places are counted anew.

        Raises:
            CaptureError: more calls than there are places.
        """
        self.places = []
        token = _CURRENT.set(self)
        try:
            yield
            self._finish()
        except BaseException:
            self.places = []
            raise
        finally:
            _CURRENT.reset(token)
            self._excess, self._noted, self._cut = [], {}, {}

    def overflows(self) -> dict[str, int]:
        """By how many rows too much was asked for at the most, of each place where a replay did since the last call."""
        count = len(self.places)
        times = self._seen[count : 2 * count].tolist()
        if times == self._known:
            return {}
        known, self._known = self._known or [0] * count, times
        return {self.places[number]: self._seen[number] for number in range(count) if times[number] != known[number]}

    def note(self, op: Any, split_sizes: torch.Tensor, rows: int) -> tuple[int, int, int]:
        """Note what a call asks for: a number by which the same split sizes are known again."""
        key = split_sizes.data_ptr(), rows, split_sizes._version
        if key not in self._noted:
            self.places.append(
                f"{len(self.places)}: {type(op).__name__}({op.num_groups} experts, {op.in_features} to {op.out_features}) "
                f"on {rows} rows"
            )
            self._excess.append(split_sizes.sum() - rows)
            self._noted[key] = split_sizes  # so that nothing else comes to lie there
        return key

    def cut(self, op: Any, split_sizes: torch.Tensor, rows: int) -> torch.Tensor:
        """The same; the split sizes, cut to the rows there are."""
        key = self.note(op, split_sizes, rows)
        if key not in self._cut:
            ends = torch.nn.functional.pad(split_sizes.cumsum(0).clamp(max=rows), (1, 0))
            self._cut[key] = ends.diff().to(split_sizes.dtype)
        return self._cut[key]

    def _finish(self) -> None:
        count = len(self.places)
        if 2 * count > len(self._seen):
            raise CaptureError(
                f"{count} calls of grouped linears are captured, and there is place for {len(self._seen) // 2} checks of "
                "their split sizes. Capture fewer layers in one graph."
            )
        if count:
            excess, most, times = torch.stack(self._excess), self._state[:count], self._state[count : 2 * count]
            torch.maximum(most, excess, out=most)
            times += excess > 0
            self._told[: 2 * count].copy_(self._state[: 2 * count], non_blocking=True)


def note(op: Any, split_sizes: torch.Tensor, rows: int) -> None:
    """Where a graph is captured that checks them: note split sizes, of which the op itself reads no more than there are.

    Args:
        op: a grouped linear. split_sizes: (N,), of its call. rows: of its input.
    """
    check = _CURRENT.get()
    if check is not None and split_sizes.device == check.device:
        check.note(op, split_sizes, rows)


def fitting(op: Any, split_sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """The split sizes, noted; and where a graph is captured that checks them, cut to the rows there are.

    Args:
        op: a grouped linear. split_sizes: (N,), of its call. rows: of its input.
    """
    check = _CURRENT.get()
    if check is None or split_sizes.device != check.device:
        return split_sizes
    return check.cut(op, split_sizes, rows)


def error(overflows: dict[str, int]) -> RowOverflowError:
    """What to raise for places with rows that are not there."""
    lines = [f"{place}: at the most {excess} more" for place, excess in overflows.items()]
    return RowOverflowError(
        "Split sizes in a CUDA graph asked for more rows than there are, and the last rows were left out:\n  "
        + "\n  ".join(lines)
        + "\nGive the buffers more rows, or have the router drop what does not fit."
    )
