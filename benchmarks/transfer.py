"""How fast a slot of many tensors is copied beside a slot of one tensor with the same bytes.

    ./run benchmarks.transfer [--json FILE]

A layer saves one slot, which a session offloads and brings back: one tensor; a tensor an expert, cut from one buffer by
split sizes; a tensor an expert, allocated one after the other, as Transformer Engine's quantizer does; and a tensor an
expert with other tensors in between. Rates are those of the session's record, in GB/s of 1e9 bytes: the best of the
steps, since a copy is not slower for its own sake.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.host_time import Layer
from te_offload import OffloadSession

EXPERTS = 64
LAYERS = 4
STEPS = 6
_HEAD_START = 20_000_000  # cycles, some 10 ms: the host is ahead of the device, as in a step that the device bounds
MIB = 1 << 20


def layouts(nbytes: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """The slot's tensors, ``nbytes`` together, in each layout."""

    def new(length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8, device="cuda")

    each = nbytes // EXPERTS
    apart = []
    fillers = []
    for _ in range(EXPERTS):
        apart.append(new(each))
        fillers.append(new(4096))
    return {
        "one tensor": (new(nbytes),),
        f"{EXPERTS}, cut from one buffer": new(nbytes).split(each),
        f"{EXPERTS}, allocated in a row": tuple(new(each) for _ in range(EXPERTS)),
        f"{EXPERTS}, others in between": tuple(apart),
    }


def measure(tensors: tuple[torch.Tensor, ...]) -> tuple[float, float, int]:
    """Best rates out and back, and the number of copies of a slot."""
    layers = [Layer([tensors], regions=False) for _ in range(LAYERS)]
    x = torch.zeros(1, device="cuda", requires_grad=True)
    out = back = 0.0
    with OffloadSession(layers, min_bytes=0, max_in_flight=0) as session:
        for _ in range(STEPS):
            with session.step():
                torch.cuda._sleep(_HEAD_START)
                y = x
                for layer in layers:
                    y = layer(y)
                y.backward(torch.ones_like(y))
            torch.cuda.synchronize()
            record = session.records[-1]
            for row in record.slots:
                out, back = max(out, row.out_gbs or 0.0), max(back, row.back_gbs or 0.0)
    return out, back, record.copies_out // LAYERS


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 32, 128], help="of a slot")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.transfer needs a CUDA device; torch sees none here.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; GB/s out, back (runs copied)\n")
    rows: list[dict[str, Any]] = []
    for mib in arguments.mib:
        for layout, tensors in layouts(mib * MIB).items():
            out, back, copies = measure(tensors)
            rows.append({"mib": mib, "layout": layout, "out_gbs": out, "back_gbs": back, "copies": copies})
        gc.collect()
    names = list(dict.fromkeys(row["layout"] for row in rows))
    print(f"| slot | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|")
    for mib in arguments.mib:
        mine = [row for row in rows if row["mib"] == mib]
        cells = [f"{row['out_gbs']:.1f}, {row['back_gbs']:.1f} ({row['copies']})" for row in mine]
        print(f"| {mib} MiB | {' | '.join(cells)} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "1.0", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
