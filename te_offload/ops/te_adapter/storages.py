"""Quantized wrappers: as storages over the same buffers, where their bytes lie, and what format an entry has.

In: wrappers (`torch.Tensor` subclasses) and bare storages. Out: bare storages that may be taken apart; addresses; names of
formats. Keeps true: a wrapper that somebody else holds is as it was; no byte is copied. Does not: quantize, or know where
an entry comes from.

Transformer Engine takes a storage apart where it is saved, and hands a wrapper on whole: a hook would see one tensor of a
dtype in which it has no memory, and a copy of it would be made in high precision, or none at all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8TensorStorage,
    GroupedTensorStorage,
    HybridQuantizedTensorStorage,
    IdentityTensorStorage,
    MXFP8Quantizer,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    NVFP4TensorStorage,
)

from te_offload.slots import FORMATS

_DIRECTIONS = {  # of a GEMM's operand: rows for the forward and dgrad, columns for wgrad
    (True, True): " by row and column",
    (True, False): " by row",
    (False, True): " by column",
    (False, False): "",
}
_STORAGES = {  # of one tensor: name of the format, and where the data of each direction is
    Float8TensorStorage: ("FP8", "_data", "_transpose"),
    Float8BlockwiseQTensorStorage: ("FP8 by blocks", "_rowwise_data", "_columnwise_data"),
    MXFP8TensorStorage: ("MXFP8", "_rowwise_data", "_columnwise_data"),
    NVFP4TensorStorage: ("NVFP4", "_rowwise_data", "_columnwise_data"),
}
_BY_DIRECTION = "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"
_BUFFERS: dict[type[Any], tuple[str, ...]] = {  # which a GEMM reads
    Float8TensorStorage: ("_data", "_transpose", "_scale_inv"),
    Float8BlockwiseQTensorStorage: _BY_DIRECTION,
    MXFP8TensorStorage: _BY_DIRECTION,
    NVFP4TensorStorage: (*_BY_DIRECTION, "_amax_rowwise", "_amax_columnwise"),
    HybridQuantizedTensorStorage: ("_rowwise_storage", "_columnwise_storage"),
    IdentityTensorStorage: ("_hp_data",),
    GroupedTensorStorage: (
        "rowwise_data",
        "columnwise_data",
        "scale_inv",
        "columnwise_scale_inv",
        "amax",
        "columnwise_amax",
    ),
}
_QUANTIZERS = {
    Float8Quantizer: "FP8",
    Float8CurrentScalingQuantizer: "FP8",
    Float8BlockQuantizer: "FP8 by blocks",
    MXFP8Quantizer: "MXFP8",
    NVFP4Quantizer: "NVFP4",
}


@functools.cache  # asked in each forward
def is_wrapper(kind: type[Any]) -> bool:
    """Whether entries of a type are wrappers, and no parameters."""
    return (
        issubclass(kind, torch.Tensor)
        and issubclass(kind, (QuantizedTensorStorage, GroupedTensorStorage))
        and not issubclass(kind, torch.nn.Parameter)
    )


def bare(entry: Any) -> Any:
    """A storage of its own over the buffers of a wrapper or a storage; the entry, if its class has none."""
    if isinstance(entry, GroupedTensorStorage):
        return entry.copy()
    kind = next((kind for kind in type(entry).__mro__ if _is_storage(kind)), None)
    if kind is None:
        return entry
    fields = entry.get_metadata()
    for name, field in fields.items():
        if isinstance(field, QuantizedTensorStorage):  # a direction of a hybrid
            fields[name] = bare(field)
    return kind(**fields)


def _is_storage(kind: type[Any]) -> bool:
    return (
        issubclass(kind, QuantizedTensorStorage)
        and not issubclass(kind, torch.Tensor)
        and kind is not QuantizedTensorStorage
        and hasattr(kind, "get_metadata")
    )


def format_of(entries: Sequence[Any]) -> str:
    """The format of saved entries, all of one, with the directions that are there; empty for none, or an unknown class."""
    entry: Any = next((entry for entry in entries if entry is not None), None)
    kind = type(entry)
    if kind is torch.Tensor:
        return FORMATS.get(entry.dtype, "")
    known = _STORAGES.get(kind)
    if known is not None:
        name, rows, columns = known
        return name + _DIRECTIONS[getattr(entry, rows) is not None, getattr(entry, columns) is not None]
    if kind is GroupedTensorStorage:
        if entry.quantizer is None:
            return FORMATS.get(entry.fake_dtype, "")
        name = _QUANTIZERS.get(type(entry.quantizer), type(entry.quantizer).__name__)
        return name + _DIRECTIONS[entry.rowwise_data is not None, entry.columnwise_data is not None]
    if kind is HybridQuantizedTensorStorage:
        ways = (entry.rowwise_sub_storage, entry.columnwise_sub_storage)
        return " and ".join(format_of([bare(way)]) for way in ways if way is not None)
    if kind is IdentityTensorStorage:
        return format_of([entry._hp_data])
    return ""


@functools.cache  # asked before each replay
def _names(kind: type[Any]) -> tuple[str, ...]:
    return next((_BUFFERS[base] for base in kind.__mro__ if base in _BUFFERS), ())


def _buffers_of(entry: Any) -> tuple[str, ...]:
    kind: Any = type(entry)
    return _names(kind)


def has_buffers(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper whose bytes lie in buffers of its own, so that its ``data_ptr()`` says nothing."""
    return bool(_buffers_of(tensor))


def addresses(entry: Any) -> tuple[int, ...]:
    """Where the bytes of a tensor or a storage lie: of a wrapper, or of what one wraps, each buffer's; 0: it has none."""
    if entry is None:
        return (0,)
    names = _buffers_of(entry)
    if not names:
        return (entry.data_ptr(),)
    return tuple([address for name in names for address in addresses(getattr(entry, name))])


def state_of(entry: Any) -> list[tuple[Any, str, Any]]:
    """What a wrapper's buffers are, and whether they are right: objects, names of attributes, and values to set again."""
    found: list[tuple[Any, str, Any]] = []
    for name in _buffers_of(entry):
        found.append((entry, name, getattr(entry, name)))
        found += state_of(found[-1][2])
    if isinstance(entry, Float8TensorStorage):
        found.append((entry, "_transpose_invalid", entry._transpose_invalid))
    return found


def is_turned(weight: Any) -> bool | None:
    """Whether the bytes of an FP8 weight with one scale are right the other way round too, as the dgrad of a Hopper GPU
    reads them. An optimizer that writes rows alone says so by a flag of the host's. ``None``: it has them one way round.
    """
    if not isinstance(weight, Float8TensorStorage) or weight._data is None or weight._transpose is None:
        return None
    return not weight._transpose_invalid


def turn(weight: Any) -> None:
    """Have an FP8 weight's bytes the other way round made anew from its rows, where they are."""
    weight._create_transpose()
