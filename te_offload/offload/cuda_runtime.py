"""torch's own CUDA runtime, for the calls that torch does not have.

In: nothing. Out: the library. Keeps true: an error that was handled does not stay behind as the thread's last error: torch
asks for that after each kernel that it launches, and would raise it for an innocent one. Does not: call the driver.
"""

from __future__ import annotations

import ctypes
import functools

import torch


@functools.cache
def runtime() -> ctypes.CDLL:
    """The library, loaded by torch already.

    Raises:
        OSError: torch has none.
    """
    major = (torch.version.cuda or "0").split(".")[0]
    found = ctypes.CDLL(f"libcudart.so.{major}")
    found.cudaGetErrorString.restype = ctypes.c_char_p
    return found


def handled(error: int) -> str:
    """The text of an error that is being handled, which the runtime then forgets (unless it can't: after an illegal access
    every call fails).
    """
    library = runtime()
    text: str = library.cudaGetErrorString(error).decode()
    library.cudaGetLastError()
    return f"{text} (error {error})"
