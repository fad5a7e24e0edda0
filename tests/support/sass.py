"""Instructions of a compiled kernel, from the object file that QuACK keeps, by the disassembler that triton brings."""

from __future__ import annotations

import functools
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_CUDA = 190  # an ELF file's machine


@dataclass(frozen=True)
class Seen:
    """What was found in one kernel.

    Attributes:
        kernel: its file's name.
        tensor_core: instructions for the tensor cores. groups: of them those that end a group that something waits for.
        parts_wait_first: for each part of a GEMM's warps: whether they wait for the kernels before this one (``ACQBULK``)
            before they read or write the GPU's memory. A part begins where its warps ask for more registers or give some
            back; before the first part nobody may touch memory at all.
    """

    kernel: str
    tensor_core: int
    groups: int
    parts_wait_first: tuple[bool, ...]


def look_into(kernels: Iterable[Path]) -> list[Seen]:
    """Several kernels, each disassembled once."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(_look_into, sorted(kernels)))


@functools.cache
def _look_into(kernel: Path) -> Seen:
    code = instructions(kernel)
    found = re.findall(r"\b[HQ]GMMA\..*", code)
    return Seen(kernel.name, len(found), sum("gsb0" in one for one in found), _parts_that_wait_first(code))


def instructions(kernel: Path) -> str:
    """Of the device code within an object file."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    data = kernel.read_bytes()
    places = [found.start() for found in re.finditer(b"\x7fELF", data)]
    (place,) = (one for one in places if struct.unpack_from("<H", data, one + 18)[0] == _CUDA)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(data[place:])
        cubin.flush()
        return subprocess.run([tool, "-c", cubin.name], capture_output=True, text=True, check=True).stdout


def _parts_that_wait_first(code: str) -> tuple[bool, ...]:
    before, *parts = re.split(r"\bUSETMAXREG\b", code)
    memory = re.compile(r"\b(?:LDG|STG|LDGSTS|ATOMG|UTMALDG|UTMASTG|UTMAREDG)\b")
    if memory.search(before):
        return (False,)
    return tuple(["ACQBULK" in part[: found.start()] for part in parts if (found := memory.search(part))])
