"""What computes a fused grouped MLP, whichever device it runs on.

In: dense tensors. Out: dense tensors. Keeps true: split sizes never reach the host in an implementation for a GPU. Does
not: save tensors, or know of ops.

Shapes: T tokens, N experts, H hidden, F ffn. Weights of FC1 are (F, H), of FC2 (H, F). With a `Gated` activation those of
FC1 are (2F, H), and ``act_input`` and its gradient (T, 2F), whose columns may lie in an order of the implementation's.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class SquaredReLU:
    """``relu(x)^2``, or with a clamp s ``(s * tanh(relu(x) / s))^2``: Transformer Engine's ScaledSReLU and ScaledTanhSReLU.

    Attributes:
        clamp: s; ``None``: there is none.
    """

    clamp: float | None = None


class Gate(enum.Enum):
    """Of a gated activation: Transformer Engine's ScaledSwiGLU, ScaledClampedQGeGLU and ScaledSiTUGLU."""

    SWIGLU = "SwiGLU"
    CLAMPED_QGEGLU = "ClampedQGeGLU"
    SITU_GLU = "SiTUGLU"


@dataclass(frozen=True)
class Gated:
    """``gate(a) * linear(b)`` of FC1's two halves a and b: its input has 2F columns.

    Attributes:
        gate: which. numbers: of the gate, as `te_offload.ops.arithmetic` takes them: none; limit, alpha and offset; or both
            betas. interleave: columns of a block of each half, of which a's and b's alternate; 0: there is one of each.
    """

    gate: Gate
    numbers: tuple[float, ...] = ()
    interleave: int = 0


Activation = SquaredReLU | Gated


class TileCount(NamedTuple):
    """How clusters take the tiles of one product on a GPU: each its next one when it is done with one.

    Attributes:
        work: int32. place: in it, of a zero, from which this launch alone counts.
    """

    work: torch.Tensor
    place: int

    def data_ptr(self) -> int:
        """Where the count lies."""
        return self.work.data_ptr() + self.work.itemsize * self.place


class TileOrder(TileCount):
    """The same of one weight gradient: of the experts with most tokens first, which ``work`` begins with in that order."""


class Counts(NamedTuple):
    """Of a forward's products; ``None``: clusters have their tiles from the start."""

    fc1: TileCount | None = None
    fc2: TileCount | None = None


class Orders(NamedTuple):
    """Of the products that follow FC2's dgrad in a backward; ``None`` as above."""

    fc2_wgrad: TileOrder | None = None
    fc1_wgrad: TileOrder | None = None
    fc1_dgrad: TileCount | None = None

    @classmethod
    def within(cls, work: torch.Tensor, experts: int) -> Orders:
        """Those that a tensor of `room` holds: an order of experts, counts of FC2's dgrad and of these; if empty, none."""
        if not work.shape[0]:
            return cls()
        return cls(TileOrder(work, experts + 1), TileOrder(work, experts + 2), TileCount(work, experts + 3))

    @staticmethod
    def room(experts: int) -> int:
        """Numbers of such a tensor."""
        return experts + 4


Tensors = torch.Tensor | Sequence[torch.Tensor]


class Kernels(Protocol):
    """Grouped products, two of them with the activation in their epilogue. Biases are (N, columns), their scales (T,).

    Rows beyond the last expert's are never read. What has T rows is zero there if it leaves the op, and else undefined.
    """

    def prepare(self, name: str, tensors: Tensors, *, written: bool = False) -> Any:
        """What stands for N weights, or for N gradients, in the calls below of one forward or backward.

        Args:
            name: of the op and what it is, for errors; one name for one set of tensors.
            tensors: N of one shape (rows, columns), or one of shape (N, rows, columns).
            written: a product is to be stored there; else a copy may stand for them.

        Raises:
            ArgumentError: they lie where the kernels cannot reach them.
        """

    def offsets(self, split_sizes: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, Counts]:
        """Where each expert's rows begin and the last one's end: (N + 1,) int32, none beyond the T rows of ``out``; and
        counts for one `fc1` and one `fc2`.

        Rows of ``out`` (T, columns) beyond the last expert's become zero: what `fc2` leaves out.
        """

    def clear(self, offsets: torch.Tensor, out: torch.Tensor) -> None:
        """Rows of ``out`` (T, columns) beyond the last expert's become zero."""

    def fc1(
        self,
        x: torch.Tensor,
        weights: Any,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``act_input = x @ w1.T + bias`` and ``fc2_input = act(act_input) * scale``, both (T, F), for x (T, H)."""

    def fc1_activated(
        self,
        x: torch.Tensor,
        weights: Any,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> torch.Tensor:
        """`fc1`'s fc2_input alone, with the same bits."""

    def fc1_linear(
        self,
        x: torch.Tensor,
        weights: Any,
        bias: torch.Tensor | None,
        offsets: torch.Tensor,
        count: TileCount | None = None,
    ) -> torch.Tensor:
        """`fc1`'s act_input alone, with the same bits."""

    def fc2(
        self,
        fc2_input: torch.Tensor,
        weights: Any,
        bias: torch.Tensor | None,
        bias_scales: torch.Tensor | None,
        offsets: torch.Tensor,
        out: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """``out = fc2_input @ w2.T + bias * bias_scale``, (T, H), in the experts' rows alone."""

    def fc2_dgrad(
        self,
        dy: torch.Tensor,
        weights: Any,
        act_input: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Orders]:
        """The gradient by act_input (T, F), the rebuilt fc2_input (T, F), the gradient by scales (T,) in float32; and how
        the products that follow take their tiles.
        """

    def fc1_dgrad(
        self,
        dact_input: torch.Tensor,
        weights: Any,
        offsets: torch.Tensor,
        out: torch.Tensor,
        count: TileCount | None = None,
    ) -> None:
        """``out = dact_input @ w1``, (T, H)."""

    def wgrad(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        offsets: torch.Tensor,
        out: Any,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
    ) -> None:
        """``out_i (+)= dy_i.T @ x_i``, (columns of dy, columns of x) each; zero for an expert without tokens.

        Args:
            dy, x: with one row or more. out: from `prepare`.
            order: used by no other launch; ``None``: clusters have their tiles from the start.
        """

    def fc1_wgrad(
        self,
        dact_input: torch.Tensor,
        x: torch.Tensor,
        offsets: torch.Tensor,
        out: Any,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
    ) -> None:
        """`wgrad` of FC1's weights."""

    def fc1_backward(
        self,
        dact_input: torch.Tensor,
        x: torch.Tensor,
        weights: Any,
        offsets: torch.Tensor,
        dx: torch.Tensor,
        dweights: Any,
        *,
        accumulate: bool,
        order: TileOrder | None = None,
        count: TileCount | None = None,
    ) -> None:
        """`fc1_dgrad` into dx and `fc1_wgrad` into dweights, in either order or at once."""

    def bias_grads(
        self,
        dy: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None = None,
        bias_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients by biases, (N, columns of dy) in dy's dtype, and by their scales, (T,), where there are any.

        Args:
            bias, bias_scales: of the forward; both or neither.
        """

    def fc1_bias_grads(self, dact_input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The gradients by FC1's biases."""
