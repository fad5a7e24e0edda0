"""How fast the link is: copies each way alone and both at once, timed.

In: a device, its transfer, host memory. Out: a `Link`. Keeps true: timed by the device's own marks, on memory of the pool
that the session uses. Does not: run in a step.
"""

from __future__ import annotations

import torch

from te_offload.offload.host_pool import HostPool
from te_offload.offload.timeline import Link
from te_offload.offload.transfer import Copy, Transfer, duration

_PROBE = 64 << 20  # bytes each way
_ROUNDS = 3


def probe_link(device: torch.device, transfer: Transfer, pool: HostPool, nbytes: int = _PROBE) -> Link:
    """Time copies of up to ``nbytes`` each way, in free memory of the pool. Blocks for some 20 ms on PCIe 5.

    Without two times 1 MiB of free host memory the rates are a petabyte a millisecond: nothing could go anyhow.
    """
    nbytes = min(nbytes, pool.free_bytes // 2 // 512 * 512)
    if nbytes < 1 << 20:
        return Link(*[1e15] * 4)
    timed, transfer.timed = transfer.timed, True
    try:
        return _probe(device, transfer, pool, nbytes)
    finally:
        transfer.timed = timed


def _probe(device: torch.device, transfer: Transfer, pool: HostPool, nbytes: int) -> Link:
    memory = torch.empty(2, nbytes, dtype=torch.uint8, device=device)
    leases = [pool.acquire(nbytes), pool.acquire(nbytes)]
    here, there = leases
    assert here is not None and there is not None
    out_pieces = _pieces(memory[0].data_ptr(), here.pieces)
    back_pieces = [(host, target, n) for target, host, n in _pieces(memory[1].data_ptr(), there.pieces)]
    out = back = out_both = back_both = 0.0
    last: list[Copy] = []
    for _ in range(_ROUNDS):
        one = transfer.copy_out(out_pieces, (transfer.mark(),))
        one.ended.wait()
        two = transfer.copy_back(back_pieces, (one.ended,))
        two.ended.wait()
        start = transfer.mark()
        both = transfer.copy_out(out_pieces, (start,)), transfer.copy_back(back_pieces, (start,))
        for copy in both:
            copy.ended.wait()
        out = max(out, nbytes / duration(transfer, one))
        back = max(back, nbytes / duration(transfer, two))
        out_both = max(out_both, nbytes / duration(transfer, both[0]))
        back_both = max(back_both, nbytes / duration(transfer, both[1]))
        last = [one, two, *both]
    for lease in leases:
        assert lease is not None
        lease.release([copy.ended for copy in last])
    return Link(out, back, out_both, back_both)


def _pieces(address: int, ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    pieces = []
    for host, nbytes in ranges:
        pieces.append((address, host, nbytes))
        address += nbytes
    return pieces
