"""What one step of the grouped MLP reads from the GPU's memory and writes to it, kernel by kernel, by Nsight Compute.

    ./run benchmarks.traffic [--experts 64 --hidden 2048 --ffn 1408 --tokens 32768] [--json FILE]

Needs ``ncu`` on the PATH, and the right to read the GPU's counters. The step is that of `benchmarks.grouped_mlp`: the bare
kernels of te_offload, Transformer Engine's ops and QuACK's GEMMs alone, each once, after two steps that are not counted, in
bf16 and with even routing. Clocks are as they are, and caches hold what the kernel before left; each kernel runs by itself,
so one that would begin beside another does not.

`must read` are a product's operands, once each: what is above that was read again after it had left the L2 cache. `to SMs`
is what L2 gave the SMs. A clock below the card's fastest says that power holds a kernel back. Kernels that take less than
10 us are left out of the table, not of the JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

METRICS = {
    "time": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "to_sms": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "cycles": "sm__cycles_elapsed.avg",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__lts2xbar_cycles_active.avg.pct_of_peak_sustained_elapsed",
}
SHAPE = {"experts": 64, "hidden": 2048, "ffn": 1408, "tokens": 32768}
SHORT_NS = 10_000
_OURS = re.compile(r"te_offload\w*?kernels(?:sm90_|rows_)device(\w+?)_object")
_PRODUCTS = {  # kernel classes, up to a dtype at their end
    "SReLUGemm": "FC1",
    "PlainGemm": "FC2",
    "DSReLUGemm": "FC2's dgrad",
    "WgradGemm": "FC2's wgrad",
    "DgradGemm": "FC1's dgrad",
    "BesideWgradGemm": "FC1's wgrad",
}


class Traffic(NamedTuple):
    """Of one launch: nanoseconds, bytes, cycles of an SM; how busy memory and the way from L2 to the SMs were, percent."""

    kernel: str
    time: int
    read: int
    written: int
    to_sms: int
    cycles: int
    memory: int
    l2: int

    @property
    def ghz(self) -> float:
        """The SMs' clock, which the card lowers where it would need more power than it may take."""
        return self.cycles / self.time


def short_name(kernel: str) -> str:
    """Whose kernel it is, and of which product if it is one of ours."""
    ours = _OURS.search(kernel)
    if ours is not None:
        name = ours[1]
        return f"te_offload: {_PRODUCTS.get(re.sub('(BF16|FP16)$', '', name), name)}"
    if "quackgemm" in kernel:
        return "QuACK: a GEMM"
    return re.sub(r"^void |<unnamed>::|\(.*|<.*", "", kernel)


def parsed(lines: Iterable[str]) -> list[Traffic]:
    """Launches in order, from ncu's raw page as CSV, among whose lines are messages.

    Raises:
        ValueError: nothing was counted.
    """
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    found = [
        Traffic(row["Kernel Name"], *(round(float(row[metric].replace(",", ""))) for metric in METRICS.values()))
        for row in rows
        if row["ID"]  # the row of units has none
    ]
    if not found:
        raise ValueError("ncu counted no launch.")
    return found


def must_read(experts: int, hidden: int, ffn: int, tokens: int) -> dict[str, int]:
    """Bytes of each product's operands in bf16; FC2's dgrad takes the activation's input too."""
    weights, x, act = 2 * experts * hidden * ffn, 2 * tokens * hidden, 2 * tokens * ffn
    found = {"FC1": x + weights, "FC2": act + weights, "FC2's dgrad": x + weights + act, "FC1's dgrad": act + weights}
    return found | dict.fromkeys(("FC2's wgrad", "FC1's wgrad"), x + act)


def run_step(shape: dict[str, int]) -> None:
    """What ncu looks at."""
    import torch

    from benchmarks.grouped_mlp import Case
    from te_offload.fused import hopper

    os.environ |= {hopper.SWITCH: "1", "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
    size = [shape[name] for name in ("experts", "hidden", "ffn", "tokens")]
    case = Case(*size, skew=None, single=False)
    ways = [case.bare, case.step_of(case.plain), case.quack()["step"]]
    for _ in range(2):
        for way in ways:
            way()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for way in ways:
        way()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def measure(shape: dict[str, int]) -> list[Traffic]:
    """All launches of a step of each way.

    Raises:
        SystemExit: there is no ncu, or it failed, with what it printed.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("benchmarks.traffic: no ncu on the PATH. It comes with CUDA's toolkit, as Nsight Compute.")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        options = [
            "--profile-from-start",
            "off",
            "--clock-control",
            "none",
            "--cache-control",
            "none",
            "--csv",
            "--page",
            "raw",
        ]
        command = [ncu, *options, "--metrics", ",".join(METRICS.values()), "--log-file", str(log)]
        command += [sys.executable, "-m", "benchmarks.traffic", "--inside"]
        command += [f"--{name}={value}" for name, value in shape.items()]
        done = subprocess.run(command, capture_output=True, text=True)
        printed = log.read_text() if log.exists() else ""
    try:
        if done.returncode == 0:
            return parsed(printed.splitlines(keepends=True))
    except ValueError:
        pass
    raise SystemExit(
        f"benchmarks.traffic: ncu counted nothing (exit status {done.returncode}).\n{printed}{done.stderr}"
    )


def table(found: Iterable[Traffic], operands: dict[str, int]) -> str:
    """Of launches that take long enough, in megabytes and microseconds."""
    rows = [
        "| kernel | us | MB read | must read | written | to SMs | SM GHz | memory busy % | L2 to SMs busy % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        if one.time < SHORT_NS:
            continue
        name = short_name(one.kernel)
        need = operands.get(name.removeprefix("te_offload: "))
        cells = one.read, need, one.written, one.to_sms
        megabytes = " | ".join("" if count is None else f"{count / 1e6:.0f}" for count in cells)
        rows.append(f"| {name} | {one.time / 1e3:.1f} | {megabytes} | {one.ghz:.2f} | {one.memory} | {one.l2} |")
    return "\n".join(rows)


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--inside", action="store_true", help="the step alone, for ncu")
    arguments = parser.parse_args()
    shape = {name: getattr(arguments, name) for name in SHAPE}
    if arguments.inside:
        run_step(shape)
        return
    found = measure(shape)
    print("E{experts} H{hidden} F{ffn} T{tokens} bf16, even routing\n".format(**shape))
    print(table(found, must_read(**shape)))
    if arguments.json:
        launches = [one._asdict() for one in found]
        arguments.json.write_text(json.dumps({"schema": "1.1", "shape": shape, "launches": launches}, indent=1) + "\n")


if __name__ == "__main__":
    main()
