"""Weights and their ``main_grad`` further apart than TMA tells places apart: read from a copy, written through a buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import transformer_engine.pytorch as te

from te_offload.graphs.layers.virtual import CudaVirtualMemory
from tests.gpu.test_hopper_on_gpu import SPLITS, fused_run, mlp, on_hopper  # noqa: F401  # a fixture of all tests here
from tests.support.mlp import assert_same_bits
from tests.support.tolerances import assert_close_to_fp64

pytestmark = pytest.mark.gpu
APART = (1 << 35) + 16  # bytes: more than 2^31 steps of 16, and no larger step leads there
Move = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def far_apart() -> Iterator[Move]:
    """Copies two tensors to addresses of the GPU that lie `APART`; most of those between have no memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = CudaVirtualMemory(device)
    with contextlib.ExitStack() as undo:

        def copied(tensor: torch.Tensor, address: int) -> torch.Tensor:
            begin = address // memory.granule * memory.granule
            nbytes = -(-(address + tensor.nbytes - begin) // memory.granule) * memory.granule
            piece = memory.create(nbytes)
            assert piece is not None
            undo.callback(memory.release, piece)
            memory.map(begin, [(piece, nbytes)])
            undo.callback(memory.unmap, begin, nbytes)
            storage = torch._C._construct_storage_from_data_pointer(address, device, tensor.nbytes)
            place = torch.empty(0, dtype=tensor.dtype, device=device)
            place.set_(storage, 0, tensor.shape, tensor.stride())
            return place.copy_(tensor)

        def move(first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            length = (APART + last.nbytes + 2 * memory.granule) // memory.granule * memory.granule
            # For good: other tests' memory, if it came to lie there, would be far apart too.
            begin = memory.reserve(length)
            return copied(first, begin), copied(last, begin + APART)

        yield move
        torch.cuda.synchronize()


def move_weights(module: te.ops.Sequential, far_apart: Move) -> None:
    """The first and the last expert's, of both linears."""
    for layer in (0, 2):
        first, last = module[layer].weight0, module[layer].weight3
        first.data, last.data = far_apart(first.data, last.data)


@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_weights_too_far_apart_give_the_same_bits_and_a_warning(far_apart: Move, activation: str) -> None:
    expected = fused_run(mlp(activation=activation), SPLITS["ragged"])
    module = mlp(activation=activation)
    move_weights(module, far_apart)
    for _ in range(2):  # the second step finds no table of the first
        with pytest.warns(UserWarning, match="copied in each forward and backward"):
            found = fused_run(module, SPLITS["ragged"])
        assert_same_bits(expected, found)
    with torch.no_grad():
        module[0].weight3.zero_()
        module[2].weight3.zero_()
    with pytest.warns(UserWarning, match="copied in each forward and backward"):
        found = fused_run(module, SPLITS["ragged"])
    tokens = SPLITS["ragged"][3]
    assert not found["output"][-tokens:].any() and torch.equal(found["output"][:-tokens], expected["output"][:-tokens])


@pytest.mark.parametrize("overwrite", [False, True], ids=["added", "overwritten"])
def test_main_grad_too_far_apart_receives_the_weight_gradients(far_apart: Move, overwrite: bool) -> None:
    plain = fused_run(mlp(), SPLITS["ragged"])
    module = mlp(accumulate_into_main_grad=True)
    for parameter in module.parameters():
        parameter.main_grad = torch.full(parameter.shape, 0.5, device="cuda")
        parameter.overwrite_main_grad = overwrite
        parameter.grad_added_to_main_grad = False
    for layer in (0, 2):
        first, last = module[layer].weight0, module[layer].weight3
        first.main_grad, last.main_grad = far_apart(first.main_grad, last.main_grad)
    fused_run(module, SPLITS["ragged"])
    for name, parameter in module.named_parameters():
        expected = plain[name].double() + (0.0 if overwrite else 0.5)
        assert_close_to_fp64(parameter.main_grad, expected, torch.bfloat16, name)
