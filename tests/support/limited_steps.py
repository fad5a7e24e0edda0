"""A program: steps of a small stack within a limit of the device's memory, under whatever allocator torch was told to use.

In: nothing. Out: a line; an error if a step took more than the limit or nothing went. Keeps true: ends with the last step.
Does not: compare bits.
"""

from __future__ import annotations

from unittest import mock

import torch

from te_offload.offload import engine
from te_offload.offload.device_memory import fill_unused
from tests.support.device_peaks import STEPS, backward_of_a_wide_loss, peak_of_steps
from tests.support.layer_stack import Model, batches

LAYERS = 8


def main() -> None:
    """Run."""
    given, model = list(batches(STEPS)), Model(LAYERS)
    filled: list[int] = []

    def counted(device: torch.device, most: int) -> list[torch.Tensor]:
        found = fill_unused(device, most)
        filled.append(sum(tensor.nbytes for tensor in found))
        assert filled[-1] <= most
        return found

    def step(number: int) -> None:
        x, sizes, scales = given[number]
        model.zero_grad(set_to_none=False)
        backward_of_a_wide_loss(model(x.detach().requires_grad_(), sizes, scales))

    most, _, _ = peak_of_steps(model.layers, step, enabled=False)
    least, all_out, _ = peak_of_steps(model.layers, step)
    limit = (most + least) // 2
    with mock.patch.object(engine, "fill_unused", counted):
        peak, out, _ = peak_of_steps(model.layers, step, device_limit=limit)
    assert peak <= limit and 0 < out < all_out, (most, least, limit, peak, out, all_out)
    print(f"within the limit: {peak} of {limit} bytes, {out} out, filled {filled}")


if __name__ == "__main__":
    main()
