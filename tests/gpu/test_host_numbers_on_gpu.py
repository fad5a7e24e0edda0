"""Numbers asked for amid copies to the host: right, and there before the copies are."""

from __future__ import annotations

import math

import pytest
import torch

import te_offload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (64,), (3, 5)], ids=str)
def test_numbers_are_those_of_tolist(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape, device="cuda")).to(dtype)
    assert te_offload.numbers_on_host(tensor) == tensor.tolist()


def test_numbers_of_views_parameters_and_extremes_are_right() -> None:
    sizes = torch.tensor([[2**62, -1, 3], [4, 5, -(2**63)]], device="cuda")
    assert te_offload.numbers_on_host(sizes.t()) == [[2**62, 4], [-1, 5], [3, -(2**63)]]
    parameter = torch.nn.Parameter(torch.tensor([-0.0, math.inf, 1e-45], device="cuda"))
    found = te_offload.numbers_on_host(parameter)
    assert found == [0.0, math.inf, parameter[2].item()]
    assert math.copysign(1, found[0]) == -1
    with torch.inference_mode():
        assert te_offload.numbers_on_host(sizes[0]) == [2**62, -1, 3]


@pytest.mark.parametrize("default", ["cpu", "cuda", "meta"])
def test_numbers_are_right_whatever_the_default_device_is(default: str) -> None:
    numbers = torch.arange(1001, device="cuda")  # a length that no test asked for before
    with torch.device(default):
        assert te_offload.numbers_on_host(numbers[{"cpu": 0, "cuda": 1, "meta": 2}[default] :])[-3:] == [998, 999, 1000]


def test_numbers_are_those_that_the_current_stream_will_have_written() -> None:
    stream = torch.cuda.Stream()
    numbers = torch.zeros(64, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        numbers += 7
        assert te_offload.numbers_on_host(numbers) == [7] * 64


def test_numbers_are_there_before_the_copies_out_that_are_queued() -> None:
    numbers = torch.arange(64, device="cuda")
    te_offload.numbers_on_host(numbers)  # page-locked memory is there after this
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    out, over = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(out):
        for _ in range(4):  # 4 GiB, some 80 ms of a link of 55 GB/s
            target.copy_(source, non_blocking=True)
        over.record()
    found = te_offload.numbers_on_host(numbers)
    assert not over.query()
    assert found == list(range(64))
    over.synchronize()
