"""Block-scaled formats in plain torch: MXFP8, FP8 by blocks and NVFP4, in the buffers of Transformer Engine's storages.

`quantize` fills the buffers that a quantizer's `inner_tensor_specs` names, `dense` reads a storage back from one direction
of them alone, so a byte that offloading changed, or a direction that it dropped wrongly, shows in the numbers.
`split_quantize` lays all experts of one direction in one allocation, as `tex.split_quantize` does for these formats
(csrc/extensions/cast.cpp, `bulk_allocate_*`): each buffer is a storage of its own, and all of them keep the allocation.

Formulas: OCP Microscaling Formats 1.0 (E8M0 scales of 32 numbers); Transformer Engine's docs for 1 x 128 and 128 x 128
blocks and for NVFP4 (E2M1 numbers, E4M3 scales of 16, one FP32 amax a tensor). The random Hadamard transform is left out:
both operands of a wgrad would have it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    GroupedTensorStorage,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from te_offload.graphs.layers.space import storage_over, tensor_of

FP8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
QUANTIZERS = (MXFP8Quantizer, Float8BlockQuantizer, NVFP4Quantizer)
STORAGES = (MXFP8TensorStorage, Float8BlockwiseQTensorStorage, NVFP4TensorStorage)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BULK_ALIGNMENT = 256
Block = tuple[int, int]


class Bulk:
    """The allocations that `split_quantize` has made and that somebody still keeps."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[_Allocation] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        return sum(one.memory.nbytes for one in self.alive)


class _Allocation:
    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)


# One tensor ----------------------------------------------------------------------------------------------------------


def block_of(quantizer: Any, *, by_column: bool) -> Block:
    """Rows and columns of the input that share a scale."""
    if isinstance(quantizer, Float8BlockQuantizer) and quantizer.block_scaling_dim == 2:
        return 128, 128
    length = 128 if isinstance(quantizer, Float8BlockQuantizer) else 32 if isinstance(quantizer, MXFP8Quantizer) else 16
    return (length, 1) if by_column else (1, length)


def _amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    rows, columns = (-(-size // length) for size, length in zip(x.shape, block, strict=True))
    padded = x.new_zeros(rows * block[0], columns * block[1])
    padded[: x.shape[0], : x.shape[1]] = x
    blocks: torch.Tensor = padded.view(rows, block[0], columns, block[1]).abs().amax((1, 3))
    return blocks


def _spread(scales: torch.Tensor, block: Block, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _pack_fp4(x: torch.Tensor) -> torch.Tensor:
    codes = (x.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (x < 0)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def _unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3))


def _fill(quantizer: Any, x: torch.Tensor, buffers: dict[str, torch.Tensor], *, by_column: bool) -> None:
    way = "columnwise" if by_column else "rowwise"
    data, scale = buffers[f"_{way}_data"], buffers[f"_{way}_scale_inv"]
    scale.zero_()
    if f"_amax_{way}" in buffers:
        buffers[f"_amax_{way}"].fill_(x.abs().max() if x.numel() else 0.0)
    if not x.numel():
        return
    block = block_of(quantizer, by_column=by_column)
    amax = _amax(x, block)
    if isinstance(quantizer, NVFP4Quantizer):
        whole = buffers[f"_amax_{way}"] / (6 * 448)
        found = (amax / 6 / whole.clamp(min=1e-30)).to(torch.float8_e4m3fn)
        inverse = found.float() * whole
        codes = _pack(x, inverse, block, by_column)
        target, values = scale.view(torch.float8_e4m3fn), found.t() if by_column else found
    elif isinstance(quantizer, MXFP8Quantizer):
        exponent = torch.frexp(amax.clamp(min=2.0**-120))[1] - 1 - 8  # E4M3's largest number has the exponent 8
        inverse = torch.ldexp(torch.ones_like(amax), exponent)
        codes = _to_fp8(quantizer, x / _spread(inverse, block, x.shape))
        target, values = scale, (exponent + 127).to(torch.uint8)
    else:
        inverse = (amax / torch.finfo(FP8[DType.cast(quantizer.dtype)]).max).clamp(min=1e-30)
        codes = _to_fp8(quantizer, x / _spread(inverse, block, x.shape))
        codes = codes.t() if by_column else codes
        flat = quantizer.block_scaling_dim == 1
        target, values = scale, inverse if flat == by_column else inverse.t()
    data.copy_(codes)
    target[: values.shape[0], : values.shape[1]] = values


def _pack(x: torch.Tensor, inverse: torch.Tensor, block: Block, by_column: bool) -> torch.Tensor:
    scaled = x / _spread(inverse, block, x.shape).clamp(min=1e-30)
    return _pack_fp4(scaled.t() if by_column else scaled)


def _to_fp8(quantizer: Any, x: torch.Tensor) -> torch.Tensor:
    dtype = FP8[DType.cast(quantizer.dtype)]
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).view(torch.uint8)


def quantize(quantizer: Any, x: torch.Tensor, buffers: dict[str, torch.Tensor] | None = None) -> Any:
    """A storage or wrapper, as the quantizer is internal or not, with the directions that it is asked for."""
    if buffers is None:
        buffers = quantizer.alloc_tensors(tuple(x.shape), device="cpu")
    assert buffers is not None
    for by_column, wanted in ((False, quantizer.rowwise_usage), (True, quantizer.columnwise_usage)):
        if wanted:
            _fill(quantizer, x.detach().float().reshape(-1, x.shape[-1]), buffers, by_column=by_column)
    metadata = quantizer.create_metadata(tuple(x.shape), dtype=x.dtype)
    return metadata["cls"].__tensor_unflatten__(buffers, metadata, tuple(x.shape), None)


def dense(storage: Any) -> torch.Tensor:
    """The numbers of a storage, read from its rows' copy if it is there, else from its columns'."""
    by_column = storage._rowwise_data is None
    way = "columnwise" if by_column else "rowwise"
    data, scale = getattr(storage, f"_{way}_data"), getattr(storage, f"_{way}_scale_inv")
    quantizer = storage._quantizer
    block = block_of(quantizer, by_column=by_column)
    if isinstance(storage, NVFP4TensorStorage):
        x = _unpack_fp4(data)
        scales = scale.view(torch.float8_e4m3fn).float() * (getattr(storage, f"_amax_{way}") / (6 * 448))
        x, scales = (x.t(), scales.t()) if by_column else (x, scales)
    elif isinstance(storage, MXFP8TensorStorage):
        x = data.view(FP8[DType.cast(quantizer.dtype)]).float()
        scales = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    else:
        x = data.view(FP8[DType.cast(quantizer.dtype)]).float()
        x = x.t() if by_column else x
        flat = quantizer.block_scaling_dim == 1
        scales = scale if flat == by_column else scale.t()
    return x * _spread(scales, block, x.shape) if x.numel() else x


# All experts ---------------------------------------------------------------------------------------------------------


def split_quantize(
    x: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Any], bulk: Bulk, *, separate: bool
) -> list[Any]:
    """`tex.split_quantize` of these formats; ``separate``: its ``disable_bulk_allocation``."""
    parts = x.split(list(splits))
    if separate:
        return [quantize(quantizer, part) for part, quantizer in zip(parts, quantizers, strict=True)]
    specs = [quantizer.inner_tensor_specs(tuple(part.shape)) for part, quantizer in zip(parts, quantizers, strict=True)]
    buffers: list[dict[str, torch.Tensor]] = [{} for _ in parts]
    for way in ("rowwise", "columnwise"):
        names = [name for name in specs[0] if way in name]
        places, size = {}, 0
        for name in names:
            for expert, spec in enumerate(specs):
                size = -(-size // BULK_ALIGNMENT) * BULK_ALIGNMENT
                places[name, expert] = size
                size += math.prod(spec[name][0]) * spec[name][1].itemsize
        allocation = _Allocation(size)
        if names:
            bulk.alive.add(allocation)
        for (name, expert), place in places.items():
            shape, dtype = specs[expert][name]
            buffers[expert][name] = _alias(allocation, place, shape, dtype)
    return [quantize(quantizer, part, own) for quantizer, part, own in zip(quantizers, parts, buffers, strict=True)]


def _alias(allocation: _Allocation, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    storage = storage_over(allocation.memory.data_ptr() + place, nbytes, torch.device("cpu"), allocation)
    strides = [math.prod(shape[place:]) for place in range(1, len(shape) + 1)]
    return tensor_of(storage, dtype, shape, strides, 0)


_FIELDS = {  # of a grouped storage, by the names of a single one's
    "_rowwise_data": "data",
    "_columnwise_data": "columnwise_data",
    "_rowwise_scale_inv": "scale_inv",
    "_columnwise_scale_inv": "columnwise_scale_inv",
    "_amax_rowwise": "amax",
    "_amax_columnwise": "columnwise_amax",
}


def group_quantize(
    x: torch.Tensor, quantizer: Any, splits: Sequence[int], first_dims: Any, tensor_offsets: Any
) -> GroupedTensorStorage:
    """`tex.group_quantize` of these formats: one expert behind the other in each buffer."""
    single = quantizer.copy()
    single.internal = True
    parts = [quantize(single, part) for part in x.split(list(splits))]
    names = quantizer.inner_tensor_specs(tuple(x.shape))
    return GroupedTensorStorage(
        shape=tuple(x.shape),
        dtype=x.dtype,
        num_tensors=len(parts),
        quantizer=quantizer,
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
        with_gemm_swizzled_scales=quantizer.optimize_for_gemm,
        **{_FIELDS[name]: torch.cat([getattr(part, name).flatten() for part in parts]) for name in names},
    )


def dense_parts(storage: GroupedTensorStorage, splits: Sequence[int]) -> list[torch.Tensor]:
    """The numbers of each expert."""
    rows, columns = storage.logical_shape
    assert rows == sum(splits)
    single = storage.quantizer.copy()
    single.internal = True
    by_column = storage.rowwise_data is None
    single.set_usage(rowwise=not by_column, columnwise=by_column)
    taken = dict.fromkeys(_FIELDS, 0)
    found = []
    for size in splits:
        buffers = {}
        for name, (shape, dtype) in single.inner_tensor_specs((size, columns)).items():
            whole = getattr(storage, _GROUPED.get(name, _FIELDS[name]))
            count = math.prod(shape)
            buffers[name] = whole[taken[name] : taken[name] + count].view(dtype).view(shape)
            taken[name] += count
        metadata = single.create_metadata((size, columns), dtype=storage.fake_dtype)
        found.append(dense(metadata["cls"].__tensor_unflatten__(buffers, metadata, (size, columns), None)))
    return found


_GROUPED = {"_rowwise_data": "rowwise_data"}
