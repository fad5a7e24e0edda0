"""What passes autograd in place of the parameters of a GroupedLinear: one tensor for all weights, one for all biases.

In: the parameters of one op. Out: stand-ins for a call of `torch.autograd.Function.apply`, where every parameter passed
costs the host a microsecond. Keeps true: gradients reach the very nodes of the parameters that they would reach without
(hooks, `torch.autograd.grad` and who follows the graph see the same), right after the op's backward; a stand-in has no
memory but one number's. Does not: compute gradients.

A stand-in is made once and used by one forward after the other, until a parameter is another tensor, or one of another
kind, or needs a gradient where it did not, or work goes to another stream: autograd's node of a parameter is tied to the
stream on which it was made, and would drag it into a CUDA graph that is captured later.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from te_offload.ops import te_adapter

_AT_ONCE = 2**64 - 1  # a node's place in the queue of a backward: that of the parameters' own nodes
_KINDS = frozenset((torch.nn.Parameter, torch.Tensor, *te_adapter.QUANTIZED_WEIGHTS))  # of parameters
_REQUIRES_GRAD, _IDENTITY = map(operator.attrgetter, ("requires_grad", "_cdata"))


class _StandsFor(torch.autograd.Function):
    """From N parameters to one tensor (N, ...), or to a number where gradients go into ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, into_main_grad: bool, *params: torch.nn.Parameter) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.params = params if into_main_grad else None
        ctx.count = len(params)
        first = params[0]
        ctx.rows = first.shape[0]
        shape = () if into_main_grad else (len(params), *first.shape)
        return torch.empty((), dtype=first.dtype, device=first.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return (None,) * (1 + ctx.count)
        if ctx.params is not None:
            return None, *te_adapter.dummy_grads(ctx.params)
        # Not `unbind`, which takes the host half as much again: it has autograd know of each part that it is one.
        return None, *torch.unsafe_split_with_sizes(grad.flatten(0, 1), [ctx.rows] * ctx.count)


def stand_ins_of(op: torch.nn.Module) -> StandIns:
    """An op's, in whichever pipeline it runs: two that hold the parameters' nodes would tie those to two streams."""
    known = op.__dict__.get(te_adapter.STAND_INS)
    if known is None:
        known = op.__dict__[te_adapter.STAND_INS] = StandIns()
    found: StandIns = known
    return found


class StandIns:
    """Those of one op. A copy has none yet."""

    def __init__(self) -> None:
        self._made_for: tuple[Any, ...] | None = None
        self._found: list[torch.Tensor] = []

    def __deepcopy__(self, memo: Any) -> StandIns:
        return StandIns()

    def __reduce__(self) -> Any:
        return StandIns, ()

    def of(
        self, params: Sequence[torch.nn.Parameter], experts: int, *, into_main_grad: bool
    ) -> list[torch.Tensor] | None:
        """For a forward that runs now; ``None`` where parameters pass as well themselves.

        Args:
            params: the weights of all experts; then the biases, if there are any. experts: their number.
            into_main_grad: the op writes its weights' gradients there, and their own are dummies.
        """
        if experts == 1 or len(params) % experts or len(params) < experts:
            return None
        first = params[0]
        stream, capturing = -1, False
        if first.is_cuda:
            stream = torch._C._cuda_getCurrentRawStream(first.device.index)
            capturing = torch.cuda.is_current_stream_capturing()
        kinds = into_main_grad, first.dtype, first.device, list(map(_REQUIRES_GRAD, params))
        made_for = params, stream, kinds, list(map(_IDENTITY, params))  # which `torch.utils.swap_tensors` changes
        known = self._made_for  # whose first entry keeps the parameters, so that no other has one's identity
        if known is not None and known[1:] == made_for[1:] and not capturing:
            return self._found
        self._found, self._made_for = [], None  # and with them the nodes of the parameters, if nobody else holds those
        if not _KINDS.issuperset(map(type, params)):
            return None
        found = [self._make(into_main_grad, params[:experts])]
        found += [self._make(False, params[at : at + experts]) for at in range(experts, len(params), experts)]
        # What is made in a capture has memory of the graph; and parameters that were computed have a graph of autograd's.
        if not capturing and all(param.is_leaf for param in params):
            self._found, self._made_for = found, made_for
        return found

    @staticmethod
    def _make(into_main_grad: bool, params: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        found: torch.Tensor = _StandsFor.apply(into_main_grad, *params)  # type: ignore[no-untyped-call]
        if found.grad_fn is not None:
            found.grad_fn._set_sequence_nr(_AT_ONCE)  # type: ignore[attr-defined]
        return found
