"""A CUDA runtime that only writes down what it is asked, for the compiled code that queues copies.

In: calls by address. Out: lists of calls. Keeps true: functions have the CUDA runtime's signatures. Does not: copy.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

OUT, BACK, COMPUTE, BESIDE = 11, 12, 13, 14  # handles of streams
TURN = 32 << 20
GPU = 3
P, N, U, S = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaEventCreateWithFlags": (ctypes.POINTER(P), U),
    "cudaEventDestroy": (P,),
    "cudaEventRecord": (P, P),
    "cudaEventQuery": (P,),
    "cudaEventSynchronize": (P,),
    "cudaEventElapsedTime": (ctypes.POINTER(ctypes.c_float), P, P),
    "cudaStreamWaitEvent": (P, P, U),
    "cudaMemcpyAsync": (P, P, S, N, P),
    "cudaMemcpyBatchAsync": (ctypes.POINTER(P), ctypes.POINTER(P), ctypes.POINTER(S), S, P, ctypes.POINTER(S), S, P),
    "cudaGetDevice": (ctypes.POINTER(N),),
    "cudaSetDevice": (N,),
    "cudaGetLastError": (),
}


class Runtime:
    """A CUDA runtime without a GPU.

    Attributes:
        calls: what was asked, less questions for the device. device: the current one.
        fails: the error of a function, by its name.
    """

    all: ClassVar[list[Runtime]] = []  # marks in a failed test's traceback call it after the test

    def __init__(self) -> None:
        self.all.append(self)
        self.calls: list[tuple[Any, ...]] = []
        self.device = GPU
        self.fails: dict[str, int] = {}
        self.last = 0
        self._events = 100
        for name, types in SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(N, *types)(self._function(name)))

    def cudaGetErrorString(self, error: int) -> bytes:
        return {1: b"invalid argument", 700: b"an illegal memory access"}[error]

    def _function(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if self.fails.get(name):
                self.last = self.fails[name]
                return self.last
            return getattr(self, f"_{name}", self._note)(name, *args) or 0

        return call

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name.removeprefix("cuda"), *args))

    def _cudaEventCreateWithFlags(self, name: str, event: Any, flags: int) -> None:
        self._events += 1
        event[0] = self._events
        self.calls.append(("EventCreate", self._events, flags, self.device))

    def _cudaEventElapsedTime(self, name: str, found: Any, first: int, second: int) -> None:
        found[0] = 1.5 * (second - first)

    def _cudaMemcpyBatchAsync(self, name: str, *args: Any) -> None:
        targets, sources, lengths, count, attributes, first, kinds, stream = args
        pieces = [(sources[i], targets[i], lengths[i]) for i in range(count)]
        order = ctypes.cast(attributes, ctypes.POINTER(N))[0]
        self.calls.append(("MemcpyBatchAsync", pieces, order, first[0], kinds, stream))

    def _cudaGetDevice(self, name: str, device: Any) -> None:
        device[0] = self.device

    def _cudaSetDevice(self, name: str, device: int) -> None:
        self.device = device
        self.calls.append(("SetDevice", device))

    def _cudaGetLastError(self, name: str) -> int:
        found, self.last = self.last, 0
        return found

    def since(self) -> list[tuple[Any, ...]]:
        """What was asked since the last time this was called."""
        found, self.calls = self.calls, []
        return found
