"""How fast copies are as nodes of a CUDA graph, beside the same copies queued one by one.

    ./run benchmarks.graph_copies [--mib 88 --copies 12 --rounds 5] [--json FILE]

One stream each way, copies of one length, each call with the direction named or left to the addresses
(`cudaMemcpyDefault`), host memory pinned by torch or registered in the way of the session's pool; the way out alone, the
way back alone, and both at once. Medians over the rounds, by events of the GPU, in GB/s of 1e9 bytes each way.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from te_offload.offload import numa
from te_offload.offload.host_pool import HostPool

KINDS = {"named": (2, 1), "by address": (4, 4)}  # cudaMemcpyKind out and back
WAYS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))
MIB = 1 << 20


class Copies:
    """The same copies, again and again.

    Args:
        count, nbytes: how many each way, and of what length. registered: host memory as the session's pool has it.
    """

    def __init__(self, count: int, nbytes: int, *, registered: bool) -> None:
        self.nbytes = nbytes
        self._device = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2 * count)]
        self._keep: list[Any] = []
        self._host = []
        device = torch.device("cuda", torch.cuda.current_device())
        pool = HostPool(None, pinned=True, node=numa.node_of_gpu(device))
        for _ in range(2 * count):
            if registered:
                lease = pool.acquire(nbytes)
                if lease is None or len(lease.pieces) != 1:
                    raise SystemExit(f"no {nbytes} bytes of host memory: {pool.failure}")
                self._keep += [pool, lease]
                self._host.append(lease.pieces[0][0])
            else:
                memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                self._keep.append(memory)
                self._host.append(memory.data_ptr())
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        self._copy = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '0').split('.')[0]}").cudaMemcpyAsync
        self._copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p

    def run(self, ways: tuple[int, ...], kinds: tuple[int, int]) -> None:
        """Queue the copies of some ways (0: out, 1: back), and have the current stream wait for them."""
        current = torch.cuda.current_stream()
        pairs = list(zip((tensor.data_ptr() for tensor in self._device), self._host, strict=True))
        for way in ways:
            stream = self._streams[way]
            stream.wait_stream(current)
            for device, host in pairs[way::2]:
                target, source = (host, device) if way == 0 else (device, host)
                error = self._copy(target, source, self.nbytes, kinds[way], stream.cuda_stream)
                if error:
                    raise SystemExit(f"cudaMemcpyAsync failed: error {error}")
        for way in ways:
            current.wait_stream(self._streams[way])


def rate(call: Callable[[], Any], nbytes: int, rounds: int) -> float:
    """GB/s."""
    spent: list[float] = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        spent.append(begin.elapsed_time(end))
    return nbytes / statistics.median(spent[1:]) / 1e6


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("mib", 88), ("copies", 12), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.graph_copies needs a CUDA device; torch sees none here.")
    rows: list[dict[str, Any]] = []
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {arguments.copies} x {arguments.mib} MiB, GB/s\n"
    )
    print("| host memory | direction | ways | one by one | in a graph |\n|---|---|---|---|---|")
    for registered in (False, True):
        copies = Copies(arguments.copies, arguments.mib * MIB, registered=registered)
        for kind, ways in itertools.product(KINDS, WAYS):
            call = functools.partial(copies.run, ways, KINDS[kind])
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            nbytes = arguments.copies * arguments.mib * MIB
            row = {
                "host": "registered" if registered else "pinned by torch",
                "direction": kind,
                "ways": "both" if len(ways) == 2 else ("out", "back")[ways[0]],
                "eager": rate(call, nbytes, arguments.rounds),
                "graph": rate(graph.replay, nbytes, arguments.rounds),
            }
            rows.append(row)
            first = " | ".join(str(row[name]) for name in ("host", "direction", "ways"))
            print(f"| {first} | {row['eager']:.1f} | {row['graph']:.1f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
