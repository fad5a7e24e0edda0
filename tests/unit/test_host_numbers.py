"""Numbers asked for past copies, where there is no GPU: what `tolist` gives."""

from __future__ import annotations

import pytest
import torch

import te_offload


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(3), torch.tensor([]), torch.arange(6).view(2, 3), torch.tensor([0.5]).bfloat16(), torch.ones(2) > 0],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_numbers_of_the_cpu_are_those_of_tolist(tensor: torch.Tensor) -> None:
    assert te_offload.numbers_on_host(tensor) == tensor.tolist()
