"""Which storages are a layer's own, and stay."""

from __future__ import annotations

import torch

from te_offload.offload.decide import storages_of
from te_offload.offload.extents import storage_key


class Sharded(torch.nn.Parameter):
    """As a DTensor: it has its memory through another tensor."""

    _local_tensor: torch.Tensor


def test_those_of_all_parameters_and_buffers_are_but_of_a_sharded_one_its_local_shard() -> None:
    shard = torch.ones(3)
    sharded = Sharded(torch.ones(6))
    sharded._local_tensor = shard
    inner, outer = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False)
    outer.add_module("inner", inner)
    outer.register_parameter("sharded", sharded)
    outer.register_parameter("none", None)
    tensors = [outer.weight, inner.weight, inner.bias, inner.running_mean, inner.running_var, shard]
    counter = inner.num_batches_tracked
    assert counter is not None
    expected = {storage_key(tensor) for tensor in (*tensors, counter) if tensor is not None}
    assert storages_of(outer) == expected


def test_sparse_one_has_none_and_hides_no_other() -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    module.register_buffer("mask", torch.eye(3).to_sparse())
    assert storages_of(module) == {storage_key(module.weight)}
