"""Megatron-core's hooks that wait for parameters, on ops in a Sequential, which calls no hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from te_offload.fused import fusions_in, hopper
from tests.support.gather_hooks import put_gathers
from tests.support.mlp import assert_same_bits, make_inputs, make_mlp, run

SPLITS = (4, 0, 6)


@pytest.mark.parametrize("way", ["0", "reference"], ids=["unfused", "fused"])
def test_ops_in_a_sequential_read_the_parameters_that_the_hooks_have_waited_for(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv(hopper.SWITCH, way)
    module = make_mlp()
    other = copy.deepcopy(module)
    arrives = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    waits = []

    def wait(part: Any) -> None:
        waits.append(part)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if any(parameter is own for own in part.parameters(recurse=False)):
                    parameter.copy_(arrives[name])

    put_gathers(module.modules(), wait)
    for _ in range(2):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(float("nan"))
        waits.clear()
        found = run(module, SPLITS)
        assert waits == [module, module[0], module[2]]
        assert_same_bits(found, run(other, SPLITS))
    assert [fusion.fused > 0 for fusion in fusions_in(module)] == [way == "reference"]


def test_no_other_hook_of_an_op_in_a_sequential_is_called() -> None:
    module = make_mlp()
    calls: list[Any] = []
    put_gathers([module[0]], calls.append)
    put_gathers([module[0]], lambda _: calls.append("of another module"), module="megatron.core.distributed.fsdp")
    put_gathers([module[0]], lambda _: calls.append("another of that module"), name="DistributedDataParallel.hook")
    module[0].register_forward_pre_hook(lambda *_: calls.append("another"))
    x, sizes, scales = make_inputs(SPLITS)
    module(x, sizes, scales, sizes)
    assert calls == [module[0]]
