"""``verify=True``: every restored slot is compared with what its producer wrote.

In: cargos, when they leave and when they are back. Out: `CorruptionError` that names the slot and the first byte that
differs; of bytes that a tensor reads, since what lies between tensors may be anyone's. Keeps true: the checksum is taken on
the compute stream where the slot was produced, and the copy that locates a difference takes a way of its own (synchronous,
to pageable memory), so no error of the engine can touch it. Does not: run fast; it is for finding bugs, and costs the host
memory of the slots once more and a synchronization each.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from te_offload.errors import CorruptionError
from te_offload.offload.cargo import Cargo, Lot

_PART = 8 << 20  # bytes summed at once


@dataclass(frozen=True)
class _Noted:
    sums: tuple[int, ...]
    copies: tuple[torch.Tensor, ...]
    forward: int


class Verifier:
    """Remembers the cargos of one step.

    Args:
        device: where they come from.
    """

    def __init__(self, device: torch.device) -> None:
        self.checked = 0
        self._device = device
        self._noted: dict[int, _Noted] = {}

    def note(self, cargo: Cargo, forward: int) -> None:
        """Take the checksums and copies of a cargo that is about to leave."""
        sources = [_bytes_at(run.address, run.nbytes, self._device) for run in cargo.runs]
        sums = tuple(_checksum(source) for source in sources)
        self._noted[id(cargo)] = _Noted(sums, tuple(source.cpu().clone() for source in sources), forward)

    def check(self, cargo: Cargo) -> None:
        """Compare a cargo that is back.

        Raises:
            CorruptionError: a byte differs.
        """
        noted = self._noted.get(id(cargo))
        if noted is None or any(lot.memory is None for lot in cargo.lots):
            return
        users = [reference() for reference in cargo.users]
        if any(user is not None and user.was_written for user in users):
            return  # whose reader will say so
        self.checked += cargo.slots
        runs = zip(cargo.runs, cargo.places, noted.sums, noted.copies, strict=True)
        for number, (run, (lot, begin), expected, copy) in enumerate(runs):
            assert lot.memory is not None
            found = lot.memory.as_strided((lot.memory.numel(),), (1,)).view(torch.uint8)[begin : begin + run.nbytes]
            if _checksum(found) == expected:
                continue
            there, spans = found.cpu(), _spans(cargo, lot, begin)
            read = torch.zeros(run.nbytes, dtype=torch.bool, device="cpu")
            for start, end, _ in spans:
                read[start:end] = True
            differing = ((there != copy) & read).nonzero()
            if len(differing):
                first = int(differing[0])
                position = first + sum(earlier.nbytes for earlier in cargo.runs[:number])
                name = next(name for start, end, name in spans if start <= first < end)
                raise CorruptionError(
                    f"{name}, forward {noted.forward}: after its way to the host and back {len(differing)} of "
                    f"{cargo.copied} bytes differ; the first one is byte {position}, {int(there[first]):#04x} "
                    f"instead of {int(copy[first]):#04x}. Gradients of this step would be "
                    "wrong: discard it, and report this."
                )

    def forget(self) -> None:
        """The step is over."""
        self._noted.clear()


def _spans(cargo: Cargo, lot: Lot, origin: int) -> list[tuple[int, int, str]]:
    """First byte, end and slot of what is read in a lot by who is still there, counted from a byte of the lot on."""
    return [
        (max(begin - origin, 0), max(end - origin, 0), user.name)
        for user in (reference() for reference in cargo.users)
        if user is not None
        for begin, end in user.spans(lot)
    ]


def _checksum(data: torch.Tensor) -> int:
    """A sum of bytes weighted by their place, modulo 2^64: any change of one byte, or of the order of bytes, shows."""
    total = 0
    for begin in range(0, data.numel(), _PART):
        part = data[begin : begin + _PART]
        places = torch.arange(begin + 1, begin + 1 + part.numel(), dtype=torch.int64, device=data.device)
        total += int((part.to(torch.int64) * (places * 2654435761 % 4294967291)).sum().item())
    return total % 2**64


def _bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The bytes of a run, as a new uint8 tensor on the device, copied on the compute stream."""
    if device.type == "cpu":
        return torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=torch.uint8)
    from te_offload.offload.cuda_copies import Copier

    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    Copier(target.device.index).start(
        [(address, target.data_ptr(), nbytes)], torch.cuda.current_stream(device).cuda_stream
    )
    return target
