"""The parameters of a GroupedLinear, separate or grouped, as the fused op reads and returns them.

In: an op. Out: tensors, in the order of its experts or of its parameters. Keeps true: no weight is copied. Does not: check
devices or dtypes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_offload.fused.given import GivenGroupedLinear
from te_offload.ops import te_adapter

_VERSION, _DTYPE = map(operator.attrgetter, ("_version", "dtype"))
_PLAIN = frozenset((torch.nn.Parameter, torch.Tensor))


@dataclass(frozen=True)
class LinearWeights:
    """Of a linear in one call that quantizes.

    Attributes:
        out_features, in_features: of each expert's.
        dense: N (out_features, in_features), or one of (N, out_features, in_features). quantized: N that are FP8 already,
            instead. keeps: whether the dgrad's copy of what a forward quantizes stays until then.
    """

    out_features: int
    in_features: int
    dense: torch.Tensor | Sequence[torch.Tensor]
    quantized: Sequence[Any] = ()
    keeps: bool = False


def first_weight(op: Any) -> torch.nn.Parameter:
    """The first weight parameter, or the only one.

    Raises:
        ArgumentError: the op has none, since someone keeps its weights elsewhere; not in evaluation.
    """
    weight: torch.nn.Parameter = _parameter(op, "weight" if op.single_grouped_weight else "weight0")
    return weight


def _parameter(op: Any, name: str) -> Any:
    if name in op._parameters:
        return op._parameters[name]
    if torch.is_grad_enabled():
        raise te_adapter.missing_parameter(op, name)
    return getattr(op, name)


def in_one(op: Any) -> bool:
    """Whether one tensor has all experts' weights."""
    return op.single_grouped_weight or isinstance(op, GivenGroupedLinear)


def dense_weight(op: Any, weight: Any) -> torch.Tensor | None:
    """A plain tensor of the weights' dtype and device, or ``None`` if they are quantized, or DTensors. To ask a grouped
    weight itself takes the host ten times as long. ``weight``: its `first_weight`.
    """
    if op.single_grouped_weight:
        dense: torch.Tensor | None = weight.rowwise_data
        return dense if dense is not None and dense.dtype.itemsize > 1 else None
    return weight if type(weight) in _PLAIN else None


def keeps_quantized_weight(op: Any) -> bool:
    """Whether the dgrad's copy of a weight that a forward quantizes stays until then; of a plain `te.ops` op it does."""
    return bool(getattr(op, "keep_quantized_weight", True))


def weight_parameters(op: Any) -> list[torch.nn.Parameter]:
    """The weights as they are registered; not by attribute, which takes the host a microsecond each."""
    if isinstance(op, GivenGroupedLinear):
        return [op.given]
    return _of_each_expert(op, "weight", together=op.single_grouped_weight)


def registered(op: Any, weights: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """All parameters, in the order in which they are registered. ``weights``: its `weight_parameters`."""
    if not op.has_bias:
        return weights
    biases = _of_each_expert(op, "bias", together=op.single_grouped_bias)
    return [*biases, *weights] if op.single_grouped_weight and not op.single_grouped_bias else [*weights, *biases]


def _of_each_expert(op: Any, name: str, *, together: bool) -> list[torch.nn.Parameter]:
    if together:
        return [_parameter(op, name)]
    if op.num_groups == 1:
        return [_parameter(op, f"{name}0")]
    try:
        return list(_getter(name, op.num_groups)(op._parameters))
    except KeyError:
        return [_parameter(op, f"{name}{number}") for number in range(op.num_groups)]


@functools.cache
def _getter(name: str, count: int) -> operator.itemgetter[Any]:
    return operator.itemgetter(*[f"{name}{number}" for number in range(count)])


def weights(op: Any, registered: list[torch.nn.Parameter]) -> torch.Tensor | Sequence[torch.Tensor]:
    """N dense weights (out_features, in_features), or one tensor of them all if they are grouped.

    Args:
        op: whose. registered: its `weight_parameters`, as the forward found them.
    """
    if isinstance(op, GivenGroupedLinear):
        return registered[0].detach()
    if op.single_grouped_weight:
        weight: Any = registered[0]
        packed: torch.Tensor = weight.rowwise_data.view(op.num_groups, op.out_features, op.in_features)
        return packed
    return registered


def linear_weights(op: Any, registered: list[torch.nn.Parameter]) -> LinearWeights:
    """Of an op, in a call that quantizes. ``registered``: its `weight_parameters`, as the forward found them."""
    sizes = op.out_features, op.in_features
    if isinstance(registered[0], te_adapter.QUANTIZED_WEIGHTS):
        return LinearWeights(*sizes, (), registered)
    return LinearWeights(*sizes, weights(op, registered), keeps=keeps_quantized_weight(op))


def bias(op: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Biases (N, out_features), if there are any; a copy of separate ones."""
    if not op.has_bias:
        return None
    if not op.single_grouped_bias:  # Transformer Engine's way takes the host a microsecond more for each
        apart = _of_each_expert(op, "bias", together=False)
        if _PLAIN.issuperset(map(type, apart)) and len(set(map(_DTYPE, apart))) == 1:
            return torch.stack(tuple(apart)).detach().to(dtype)
    packed: torch.Tensor = op._get_packed_bias_tensor(dtype).detach()
    return packed


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was written to in place."""
    return list(map(_VERSION, tensors))


def in_order(
    op: Any, weights: list[torch.Tensor | None], biases: torch.Tensor | None, *, together: bool
) -> list[torch.Tensor | None]:
    """Gradients in the order in which the op's parameters are registered; or those of their stand-ins, ``together``."""
    if biases is None:
        return weights
    if together:
        return [*weights, biases]
    if op.single_grouped_bias:
        return [*weights, biases]
    apart = list(biases.unbind(0))
    return [*apart, *weights] if op.single_grouped_weight else [*weights, *apart]
