"""Host memory on the NUMA node of a GPU: which node that is, how memory gets there, and where it is.

In: a GPU, addresses. Out: node numbers. Keeps true: where the machine does not say (one node, no sysfs, a container
that forbids the call) the answer is ``None`` and nothing is bound; never an exception. Does not: allocate.

A GPU that copies from the other node's memory gets a third of the link on some machines (notes on GB200: 115 instead of
330 GB/s). Linux: mbind(2), move_pages(2); numbers of the system calls are x86-64's and arm64's.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import torch

_CALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}  # mbind, move_pages
_MPOL_BIND = 2
_PAGE = 4096
_NODES = Path("/sys/devices/system/node")


def node_of_gpu(device: torch.device) -> int | None:
    """The NUMA node that a GPU hangs on; ``None`` if the machine has one node or does not say."""
    if device.type != "cuda" or len(list(_NODES.glob("node[0-9]*"))) < 2:
        return None
    gpu = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(gpu, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    where = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{where}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind(address: int, nbytes: int, node: int) -> bool:
    """Ask for the pages of a range that nobody has touched yet to come from ``node``; whether the system agreed."""
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    return _call(0, address, nbytes, _MPOL_BIND, ctypes.addressof(mask), 16 * 64, 0) == 0


def nodes_of(address: int, nbytes: int, samples: int = 64) -> set[int]:
    """The nodes on which up to ``samples`` pages of a touched range lie; empty if the system does not say."""
    first = -(-address // _PAGE) * _PAGE
    count = min(samples, max((address + nbytes - first) // _PAGE, 0))
    if not count:
        return set()
    step = (address + nbytes - first) // _PAGE // count * _PAGE
    pages = (ctypes.c_void_p * count)(*(first + number * step for number in range(count)))
    status = (ctypes.c_int * count)(*([-1] * count))
    failed = _call(1, 0, count, ctypes.addressof(pages), 0, ctypes.addressof(status), 0)
    return set() if failed else {node for node in status if node >= 0}


def _call(which: int, *arguments: int) -> int:
    numbers = _CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        return -1
    libc = ctypes.CDLL(None)
    return int(libc.syscall(ctypes.c_long(numbers[which]), *(ctypes.c_ulong(argument) for argument in arguments)))
