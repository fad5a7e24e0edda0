"""What the graphs of several layers have in common: the stream of their captures, memory, and marks.

In: a device. Out: `Ground`. Keeps true: addresses are given back when nobody can read them any more. Does not: capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from te_offload.errors import UnsupportedError
from te_offload.graphs.layers.bank import Bank
from te_offload.graphs.layers.resident import ResidentMemory
from te_offload.graphs.layers.space import Space
from te_offload.graphs.layers.virtual import CudaVirtualMemory, VirtualMemory
from te_offload.offload.streams import new_stream
from te_offload.offload.transfer import Transfer, make_transfer

_ROUNDS = 8  # of replays of all layers, after which memory that none of them needed goes back


class Ground:
    """See above.

    Args:
        device: a GPU. virtual: take virtual memory where there is any.

    Attributes:
        resident: why memory stays behind its addresses for good; ``None``: it does not.
        launched: called when a forward's graph has been launched. raises_overflow, quantized: see `capture_layers`.
    """

    def __init__(self, device: torch.device, *, virtual: bool) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self.stream = new_stream(self.device.index)
        self.resident: str | None = None
        memory: VirtualMemory
        try:
            if not virtual:
                raise UnsupportedError("memory is to stay resident, as asked.")
            memory = CudaVirtualMemory(self.device)
        except UnsupportedError as error:
            self.resident = str(error)
            memory = ResidentMemory(self.device)
        self.bank = Bank(memory, torch.cuda.empty_cache)
        self.space = Space(self.device, self.bank)
        self.transfer: Transfer = make_transfer(self.device)
        self.transfer.timed = False
        self._outputs: set[int] = set()
        self._given_up: set[int] = set()
        self.launched: Callable[[], None] = _nothing
        self.raises_overflow = True
        self.quantized = True
        self._warns = _set_warning(on=False)
        self._readers: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}  # of gradients, by handles
        self.note_reader(self.stream)
        self._replays_on: torch.cuda.Stream | None = None
        self._leader: object = None
        self._rounds = 0

    def in_capture(self) -> bool:
        """Whether someone captures the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def order(self) -> None:
        """What has been let go of so far is used by nothing that is queued on the current stream from now on."""
        self.bank.order(self.transfer.mark)

    def begin_replay(self) -> None:
        """A replay is queued next; graphs share scratch memory, so it comes after those before it on any stream."""
        self.order()
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        before = self._replays_on
        if before is None or before.cuda_stream != handle:
            self._replays_on = torch.cuda.current_stream(self.device)
            if before is not None:
                self._replays_on.wait_stream(before)

    def wait_for_gradients(self) -> None:
        """A backward's graph is replayed next: it comes after what reads the gradients of those before it.

        A node that accumulates gradients may run on the stream of the warm-up (see `_set_warning`), or on the one on which
        whoever holds it made it, and torch's allocator, which would know, does not own this memory.
        """
        current = torch._C._cuda_getCurrentRawStream(self.device.index)
        for handle, (stream, event) in self._readers.items():
            if handle != current:
                event.record(stream)
                event.wait()

    def note_reader(self, stream: torch.cuda.Stream | None = None) -> None:
        """Gradients of the layers' parameters are read on a stream; ``None``: on the current one."""
        if stream is None:
            stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._readers:
            self._readers[stream.cuda_stream] = stream, torch.cuda.Event()

    def begin_round(self, pair: object) -> None:
        """A forward is replayed: with the first one that comes again, another round has begun."""
        if self._leader is None:
            self._leader = pair
        if self._leader is pair:
            self._rounds += 1
            if self._rounds % _ROUNDS == 0:
                self.bank.relax()

    def trim(self) -> None:
        """Give back what captures took and replays do not need."""
        self._leader, self._rounds = None, 0
        self.bank.trim()
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def add_outputs(self, addresses: Iterable[int]) -> None:
        """Graphs write their outputs there."""
        self._outputs.update(addresses)

    def remove_outputs(self, addresses: Iterable[int]) -> None:
        """They do no more."""
        self._outputs.difference_update(addresses)

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a graph's output, as the graph wrote it."""
        return tensor.is_contiguous() and tensor.data_ptr() in self._outputs

    def writes(self, address: int) -> bool:
        """Whether a graph writes an output there."""
        return address in self._outputs

    def give_up(self, segments: Iterable[int]) -> None:
        """Graphs that know these segments are gone: give them back, once no living tensor covers them."""
        self._given_up.update(segments)
        self.bank.count()
        for segment in list(self._given_up):
            zones = self.space.zones_of(segment)
            if not any(zone.owners for zone in zones):
                for zone in zones:
                    self.bank.take_back(zone)
                self.space.drop_segment(segment)
                self._given_up.discard(segment)

    def close(self) -> None:
        """Give back what nobody uses. The device must be idle."""
        self.give_up(())
        self.bank.trim()
        if self._warns:
            _set_warning(on=True)


def _set_warning(*, on: bool) -> bool:
    """Have torch warn of nodes that accumulate gradients on another stream than that of the gradient, or not; as it was.

    Layers are warmed up on the stream of their captures, so that these nodes, which a loss that is kept keeps too, do not
    belong to the default stream, which no capture may wait for. Replays, on the current stream, then have it wait for that
    one; this is right, and all that torch would tell.
    """
    asks = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", None)
    if asks is None:  # a torch that does not warn
        return False
    before = bool(asks())
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(on)
    return before


def _nothing() -> None:
    """Nobody waits for a launch."""
