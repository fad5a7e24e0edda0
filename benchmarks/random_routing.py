"""A long run with random routing, with offloading and without: are the bits the same, and is no host memory taken?

    ./run benchmarks.random_routing [--steps 1000] [--fp8] [--json FILE]

Two stacks with the same weights take the same steps, each step with another number of tokens and other counts for each
expert, some of them zero; SGD changes the weights after each. After every step all gradients are compared bit for bit on
the device, at the end all weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_offload import OffloadSession, ops
from te_offload.ops import te_adapter

LAYERS, EXPERTS, HIDDEN, FFN, TOKENS = 6, 16, 512, 1024, 8192


def make_stack() -> torch.nn.ModuleList:
    """Layers from one seed."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    return torch.nn.ModuleList(
        te.ops.Sequential(
            ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **size),
            ops.ScaledSReLU(),
            ops.GroupedLinear(EXPERTS, FFN, HIDDEN, **size),
        )
        for _ in range(LAYERS)
    )


def forward(layers: torch.nn.ModuleList, x: torch.Tensor, splits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The stack with residuals."""
    for layer in layers:
        x = x + layer(x, splits, scales, splits)
    return x


def random_splits(generator: torch.Generator) -> torch.Tensor:
    """Token counts: multiples of 16, as FP8 needs, of at most `TOKENS` together; some are zero."""
    units = int(torch.randint(1, TOKENS // 16 + 1, (), generator=generator))
    cuts = torch.randint(0, units + 1, (EXPERTS - 1,), generator=generator).sort().values
    ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([units])])
    return 16 * ends.diff()


def main() -> None:
    """Run, print a line each 100 steps and the result, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.random_routing needs a CUDA device; torch sees none here.")
    generator = torch.Generator().manual_seed(0)
    plain, offloaded = make_stack(), make_stack()
    optimizers = [torch.optim.SGD(layers.parameters(), lr=1e-3) for layers in (plain, offloaded)]
    reserve = sum(TOKENS * width * 2 + (1 << 16) for width in (HIDDEN, FFN, FFN)) * LAYERS
    different = moved = back = 0
    outcomes: dict[str, int] = {}
    allocations = []
    start = time.perf_counter()
    with OffloadSession(offloaded, min_bytes=0, max_in_flight="4MiB", host_reserve=reserve) as session:
        for step in range(arguments.steps):
            splits = random_splits(generator)
            tokens = int(splits.sum())
            inputs = torch.randn(tokens, HIDDEN, generator=generator).to("cuda", torch.bfloat16)
            scales = torch.rand(tokens, generator=generator).to("cuda", torch.bfloat16)
            grads = []
            for layers, context in ((plain, contextlib.nullcontext()), (offloaded, session.step())):
                x = inputs.clone().requires_grad_()
                layers.zero_grad()
                recipe = te.autocast(recipe=Float8CurrentScaling()) if arguments.fp8 else contextlib.nullcontext()
                with context:
                    with recipe:
                        y = forward(layers, x, splits.cuda(), scales)
                    (y.float().square().mean()).backward()
                grads.append([x.grad, *(parameter.grad for parameter in layers.parameters())])
            different += sum(not torch.equal(one, other) for one, other in zip(*grads, strict=True))
            for optimizer in optimizers:
                optimizer.step()
            record = session.records[-1]
            moved, back = moved + record.bytes_out, back + record.bytes_back
            allocations.append(record.host_allocations)
            for row in record.slots:
                outcomes[row.outcome.value or row.reason.value] = (
                    outcomes.get(row.outcome.value or row.reason.value, 0) + 1
                )
            if step % 100 == 99:
                print(f"step {step + 1}: {different} gradients differ, {moved / 2**30:.1f} GiB out", flush=True)
        held, peak = record.host_held, record.host_peak
    weights = sum(not torch.equal(a, b) for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True))
    number = te_adapter.cublaslt_version()
    result = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": te_adapter.installed_version(),
        "cublaslt": f"{number // 10000}.{number // 100 % 100}",
        "format": "FP8 current scaling" if arguments.fp8 else "bf16",
        "steps": arguments.steps,
        "gradients_that_differ": different,
        "weights_that_differ_at_the_end": weights,
        "bytes_out": moved,
        "bytes_back": back,
        "slots": outcomes,
        "host_allocations_after_step_3": allocations[-1] - allocations[min(2, len(allocations) - 1)],
        "host_held": held,
        "host_peak_of_the_last_step": peak,
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if different or weights or not moved or not back:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
