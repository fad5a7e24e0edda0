"""Quantized wrappers among saved entries, as storages over the same buffers.

In: wrappers (`torch.Tensor` subclasses) and bare storages. Out: bare storages that may be taken apart. Keeps true: a
wrapper that somebody else holds is as it was; no byte is copied. Does not: quantize, or know where an entry comes from.

Transformer Engine takes a storage apart where it is saved, and hands a wrapper on whole: a hook would see one tensor of a
dtype in which it has no memory, and a copy of it would be made in high precision, or none at all.
"""

from __future__ import annotations

from typing import Any

import torch
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor import GroupedTensorStorage


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
