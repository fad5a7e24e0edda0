"""What a launch of Triton's kernels that is not its own takes for the same kernel, beside what Triton does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from te_offload.fused.kernels import fp8_device
from te_offload.fused.kernels.triton_launch import Relaunched

TARGET = GPUTarget("cuda", 90, 32)
MEMORY = torch.zeros(64, dtype=torch.uint8)
TENSORS = [MEMORY.view(torch.float32), MEMORY[4:].view(torch.float32), MEMORY.view(torch.bfloat16), MEMORY, MEMORY[1:]]
INTEGERS = st.one_of(
    st.sampled_from([0, 1, 2, 15, 16, 17, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**33 + 1]), st.integers(0, 99)
)
ARGUMENTS = st.one_of(st.none(), st.integers(0, len(TENSORS) - 1).map(TENSORS.__getitem__), INTEGERS, st.just(2.5))


def sum_of(source: Any, other: Any, count: Any, factor: Any, SIZE: tl.constexpr) -> None: ...


@given(st.lists(ARGUMENTS, min_size=4, max_size=4), ARGUMENTS, st.integers(0, 4))
def test_two_calls_share_a_compiled_kernel_just_where_triton_compiles_one_for_both(
    arguments: list[Any], another: Any, place: int
) -> None:
    kernel = JITFunction(sum_of)
    specialize = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(TARGET))
    one, other = [*arguments, 64], [*arguments, 64]
    other[place] = another if place < 4 else 128
    launched = Relaunched(kernel)
    same = specialize(*one)[1] == specialize(*other)[1]
    assert (launched.kinds(*one) == launched.kinds(*other)) is same


class Kernel:
    """Stands for a kernel of ``triton.jit``, and for what its launches return; writes launches down."""

    def __init__(self, fn: Any = sum_of, *, compiles: bool = True) -> None:
        self.fn = fn
        self.compiles = compiles
        self.launches: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, num_warps: int) -> Any:
            self.launches.append(("by itself", grid, arguments, num_warps))
            return Compiled(self.launches) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, launches: list[Any]) -> None:
        self.launches = launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.launches.append(("again", grid, arguments))


def test_what_a_launch_returned_is_launched_again_with_the_arguments_and_the_grid_of_that_call() -> None:
    kernel = Kernel()
    launched = Relaunched(kernel)
    one, other = (TENSORS[0], None, 32, 2.5, 64), (TENSORS[0], None, 48, 1.5, 64)
    launched[3, 5](*one, num_warps=8)
    launched[7, 9](*other, num_warps=8)
    assert kernel.launches == [("by itself", (3, 5), one, 8), ("again", (7, 9, 1), other)]


@pytest.mark.parametrize(
    "other",
    [
        (TENSORS[1], None, 32, 2.5, 64),
        (TENSORS[2], None, 32, 2.5, 64),
        (None, None, 32, 2.5, 64),
        (TENSORS[0], None, 33, 2.5, 64),
        (TENSORS[0], None, 32, 2.5, 65),
    ],
)
def test_arguments_that_need_another_kernel_go_through_triton(other: tuple[Any, ...]) -> None:
    kernel = Kernel()
    launched = Relaunched(kernel)
    one = TENSORS[0], None, 32, 2.5, 64
    for arguments in (one, other, one, other):
        launched[1,](*arguments)
    assert [launch[0] for launch in kernel.launches] == ["by itself", "by itself", "again", "again"]


def test_another_number_of_warps_goes_through_triton() -> None:
    kernel = Kernel()
    launched = Relaunched(kernel)
    launched[1,](TENSORS[0], None, 32, 2.5, 64)
    launched[1,](TENSORS[0], None, 32, 2.5, 64, num_warps=8)
    assert [launch[-1] for launch in kernel.launches] == [4, 8]


def test_the_interpreter_returns_nothing_that_could_be_launched_again() -> None:
    kernel = Kernel(compiles=False)
    launched = Relaunched(kernel)
    for _ in range(2):
        launched[1,](TENSORS[0], None, 32, 2.5, 64)
    assert [launch[0] for launch in kernel.launches] == ["by itself", "by itself"]


def test_a_call_with_an_argument_too_few_is_left_to_triton_which_refuses_it() -> None:
    kernel = Kernel()
    launched = Relaunched(kernel)
    launched[1,](TENSORS[0], None, 32, 2.5, 64)
    launched[1,](TENSORS[0], None, 32, 2.5)
    assert [launch[0] for launch in kernel.launches] == ["by itself", "by itself"]


def test_a_kernel_with_an_argument_behind_a_constant_is_refused() -> None:
    def odd(source: Any, SIZE: tl.constexpr, count: Any) -> None: ...

    with pytest.raises(TypeError, match="odd has an argument behind a constant"):
        Relaunched(Kernel(odd))


def test_kernels_in_use_end_with_the_constants_that_triton_finds() -> None:
    for kernel in (fp8_device.expert_scales, fp8_device.quantize_tokens, fp8_device.weight_columns):
        constant = [parameter.is_constexpr for parameter in kernel._kernel.params]
        assert constant == [number >= kernel._variables for number in range(len(constant))]
