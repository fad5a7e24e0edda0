"""Instructions of a compiled kernel, from the object file that QuACK keeps, by the disassembler that triton brings."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from pathlib import Path

_CUDA = 190  # an ELF file's machine


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


def tensor_core_instructions(kernel: Path) -> tuple[int, int]:
    """How many there are, and how many of them end a group that something waits for."""
    found = re.findall(r"\b[HQ]GMMA\..*", instructions(kernel))
    return len(found), sum("gsb0" in one for one in found)


def parts_that_wait_first(kernel: Path) -> list[bool]:
    """For each part of a GEMM's warps: whether they wait for the kernels before this one (``ACQBULK``) before they read or
    write the GPU's memory. A part begins where its warps ask for more registers or give some back; before the first part
    nobody may touch memory at all.
    """
    code = instructions(kernel)
    before, *parts = re.split(r"\bUSETMAXREG\b", code)
    memory = re.compile(r"\b(?:LDG|STG|LDGSTS|ATOMG|UTMALDG|UTMASTG|UTMAREDG)\b")
    if memory.search(before):
        return [False]
    return [("ACQBULK" in part[: found.start()]) for part in parts if (found := memory.search(part))]
