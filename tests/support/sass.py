"""Instructions of a compiled kernel, from the object file that QuACK keeps, by the disassembler that triton brings."""

from __future__ import annotations

import functools
import itertools
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
        kernel: its file's name. symbol: the function's, which has its class's name in it.
        tensor_core: instructions for the tensor cores. groups: of them those that end a group that something waits for.
        parts_wait_first: for each part of a GEMM's warps: whether they wait for the kernels before this one (``ACQBULK``)
            before they read or write the GPU's memory. A part begins where its warps ask for more registers or give some
            back; before the first part nobody may touch memory at all.
        waits_last: the warps that load operands wait for the kernels before this one after their last load.
        lets_next_begin: once they have waited, and before they touch memory, all warps let the next kernel begin
            (``PREEXIT``).
        stores_apart: where results are stored, warp groups of 128 threads wait for their own only.
        counts: something is counted in the GPU's memory (``ATOMG``): the tiles that clusters have taken.
        wide_in_fp8: FP8 products of 192 columns. after_groups: what comes next after each instruction that ends a group, of
            those that end one, arrive at a barrier or wait for products.
    """

    kernel: str
    symbol: str
    tensor_core: int
    groups: int
    parts_wait_first: tuple[bool, ...]
    waits_last: bool
    lets_next_begin: bool
    stores_apart: bool
    counts: bool
    wide_in_fp8: bool
    after_groups: frozenset[str]


def look_into(kernels: Iterable[Path]) -> list[Seen]:
    """Several kernels, each disassembled once."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(_look_into, sorted(kernels)))


@functools.cache
def _look_into(kernel: Path) -> Seen:
    code = instructions(kernel)
    found = re.findall(r"\b[HQ]GMMA\..*", code)
    symbol = re.search(r"\.section\s+\.text\.(\w+)", code)
    assert symbol is not None, kernel
    return Seen(
        kernel.name,
        symbol[1],
        len(found),
        sum("gsb0" in one for one in found),
        _parts_that_wait_first(code),
        _waits_last(code),
        _lets_next_begin(code),
        _stores_apart(code),
        re.search(r"\bATOMG\b", code) is not None,
        "QGMMA.64x192" in code,
        frozenset(_after_groups(code)),
    )


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


def _after_groups(code: str) -> list[str]:
    found = re.findall(r"[HQ]GMMA\.[^;]*gsb0|BAR\.ARV|WARPGROUP\.DEPBAR", code)
    return [other for one, other in itertools.pairwise(found) if "gsb0" in one]


_MEMORY = re.compile(r"\b(?:LDG|STG|LDGSTS|ATOMG|REDG|UTMALDG|UTMASTG|UTMAREDG)\b")


def _parts(code: str) -> list[str]:
    """What comes before the first part, and the parts."""
    return re.split(r"\bUSETMAXREG\b", code)


def _parts_that_wait_first(code: str) -> tuple[bool, ...]:
    before, *parts = _parts(code)
    if _MEMORY.search(before):
        return (False,)
    return tuple(["ACQBULK" in part[: found.start()] for part in parts if (found := _MEMORY.search(part))])


def _waits_last(code: str) -> bool:
    _, loads, *_ = (*_parts(code), "")
    last = max((found.end() for found in re.finditer(r"\bUTMALDG\b", loads)), default=len(loads))
    return "ACQBULK" in loads[last:] and "ACQBULK" not in loads[:last]


def _stores_apart(code: str) -> bool:
    after_products = re.split(r"\b[HQ]GMMA\b", code)[-1]
    return set(re.findall(r"\bBAR\.SYNC\S* .*, (0x\w+)", after_products)) == {"0x80"}


def _lets_next_begin(code: str) -> bool:
    _, *parts = _parts(code)
    ahead = [part[: found.start()] for part in parts if (found := _MEMORY.search(part))]
    return bool(ahead) and all(re.search(r"ACQBULK.*PREEXIT", part, re.DOTALL) for part in ahead)
