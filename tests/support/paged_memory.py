"""Virtual memory of the CPU, with the calls of the GPU's: addresses and memory apart, by Linux's mmap and memory files."""

from __future__ import annotations

import ctypes
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_FIXED, _NORESERVE, _NONE = 0x10, 0x4000, 0


class PagedMemory:
    """See `graphs.layers.virtual.VirtualMemory`. A use of addresses without memory ends the process.

    Attributes:
        created: bytes of memory that exist. mapped: where pieces of it are, and their bytes. log: calls, in order.
    """

    granule = 2 << 20
    mirrors = True

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.created = 0
        self.mapped: dict[int, int] = {}
        self.log: list[str] = []
        self._sizes: dict[int, int] = {}

    def reserve(self, nbytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        address = _LIBC.mmap(None, nbytes + self.granule, _NONE, flags, -1, 0)
        return -(-int(address) // self.granule) * self.granule

    def free(self, address: int, nbytes: int) -> None:
        assert not any(address <= place < address + nbytes for place in self.mapped), "addresses with memory given back"
        self.log.append("free")

    def create(self, nbytes: int) -> int | None:
        if self.limit is not None and self.created + nbytes > self.limit:
            return None
        memory = os.memfd_create("piece")
        os.ftruncate(memory, nbytes)
        self._sizes[memory] = nbytes
        self.created += nbytes
        return memory

    def release(self, memory: int) -> None:
        self.created -= self._sizes.pop(memory)
        os.close(memory)

    def map(self, address: int, pieces: list[tuple[int, int]]) -> None:
        place = address
        for memory, nbytes in pieces:
            assert place not in self.mapped, "addresses with memory were mapped"
            assert nbytes == self._sizes[memory], "memory is mapped whole"
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            found = _LIBC.mmap(place, nbytes, protection, mmap.MAP_SHARED | _FIXED, memory, 0)
            assert found == place
            self.mapped[place] = nbytes
            place += nbytes
        self.log.append("map")

    def unmap(self, address: int, nbytes: int) -> None:
        place = address
        while place < address + nbytes:
            place += self.mapped.pop(place)
        assert place == address + nbytes, "pieces go whole"
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _LIBC.mmap(address, nbytes, _NONE, flags, -1, 0)
        self.log.append("unmap")
