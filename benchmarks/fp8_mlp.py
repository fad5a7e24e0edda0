"""The ways of `benchmarks.grouped_mlp --recipe`: one grouped MLP in FP8, weights quantized in each step, or FP8 already.

In: a shape and a recipe. Out: ways, each with a forward, and a forward and backward. Two regimes, for us and for the peer
alike: (i) weights are bf16 and quantized in each forward, and once more in the backward where no copy stays; (ii) they are
FP8 parameters (`te.quantized_model_init`), or, in the module te.GroupedLinear as Megatron-LM runs it, quantized copies that
stay over micro-batches (``is_first_microbatch=False``), whose split sizes the host knows. `floor` is what a regime cannot
go below: the products alone, measured, and the bytes that quantizing reads and writes at the measured rate of a copy on the
GPU. By blocks, and with a gated activation, there is no floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_offload import OffloadSession, ops
from te_offload.fused.kernels.interface import SquaredReLU
from te_offload.fused.kernels.sm90_fp8 import Sm90Fp8Kernels
from te_offload.ops.scaling import Scaling

Step = Callable[[], Any]
Way = dict[str, Step]
E4M3, E5M2 = Scaling(torch.float8_e4m3fn), Scaling(torch.float8_e5m2)


class Fp8Case:
    """One shape under one recipe.

    Args:
        experts, hidden, ffn, tokens: the shape. sizes: tokens of each expert. gated: SwiGLU, else squared ReLU.
    """

    def __init__(
        self, experts: int, hidden: int, ffn: int, tokens: int, sizes: list[int], recipe: Any, *, gated: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.shape = experts, hidden, ffn
        self._gated = gated
        self._wide = 2 * ffn if gated else ffn
        self.recipe = recipe
        self.splits = sizes
        self.sizes = torch.tensor(sizes, device="cuda")
        self.x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.scales = torch.rand(tokens, device="cuda").requires_grad_()
        self.dy = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)

    def ways(self, only: Sequence[str] = ("",)) -> dict[str, Way]:
        """All, or those with a text of ``only`` in their name; of no other one are there weights."""
        makes: dict[str, Callable[[], Way]] = {
            "te_offload, fused (i)": lambda: self._of_ops(ops, quantized=False),
            "te_offload, fused, weights made again (i)": lambda: self._of_ops(
                ops, quantized=False, keep_quantized_weight=False
            ),
            "Transformer Engine's ops (i)": lambda: self._of_ops(te.ops, quantized=False),
            "te_offload, fused (ii)": lambda: self._of_ops(ops, quantized=True),
            "Transformer Engine's ops (ii)": lambda: self._of_ops(te.ops, quantized=True),
            "te.GroupedLinear, cached weights (ii)": self._of_modules,
        }
        return {name: make() for name, make in makes.items() if any(text in name for text in only)}

    @property
    def has_floor(self) -> bool:
        """Whether `floor` knows the shape and recipe."""
        return not (self._gated or self.recipe.float8_block_scaling())

    def offloaded(self) -> dict[str, int]:
        """Bytes of each slot that goes in a step, weights quantized in it, and of all copies out."""
        module = self._module(ops, quantized=False)
        with OffloadSession(module, min_bytes=0) as session:
            for _ in range(2):
                with session.step():
                    with te.autocast(enabled=True, recipe=self.recipe):
                        y = module(self.x, self.sizes, self.scales, self.sizes)
                    y.backward(self.dy)
        record = session.records[-1]
        self.x.grad = self.scales.grad = None
        return {row.slot.value: row.bytes_out for row in record.slots if row.slot is not None} | {
            "all": record.bytes_out
        }

    def _module(self, room: Any, *, quantized: bool, **options: Any) -> Any:
        experts, hidden, ffn = self.shape
        size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16, **options}
        with te.quantized_model_init(enabled=quantized, recipe=self.recipe):
            return te.ops.Sequential(
                room.GroupedLinear(experts, hidden, self._wide, **size),
                room.ScaledSwiGLU() if self._gated else room.ScaledSReLU(),
                room.GroupedLinear(experts, ffn, hidden, **size),
            )

    def _of_ops(self, room: Any, *, quantized: bool, **options: Any) -> Way:
        module = self._module(room, quantized=quantized, **options)
        return self._way(lambda: module(self.x, self.sizes, self.scales, self.sizes), module)

    def _of_modules(self) -> Way:
        experts, hidden, ffn = self.shape
        size: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16}
        fc1, fc2 = te.GroupedLinear(experts, hidden, self._wide, **size), te.GroupedLinear(experts, ffn, hidden, **size)
        activation = te.ops.Sequential(te.ops.ScaledSwiGLU() if self._gated else te.ops.ScaledSReLU())
        first: list[bool] = [True]

        def forward() -> torch.Tensor:
            is_first = first.pop() if first else False
            y = fc1(self.x, self.splits, is_first_microbatch=is_first)
            found: torch.Tensor = fc2(activation(y, self.scales), self.splits, is_first_microbatch=is_first)
            return found

        return self._way(forward, torch.nn.ModuleList([fc1, fc2]))

    def _way(self, call: Step, module: torch.nn.Module) -> Way:
        wanted = [self.x, self.scales, *module.parameters()]

        def forward() -> torch.Tensor:
            with te.autocast(enabled=True, recipe=self.recipe):
                found: torch.Tensor = call()
            return found

        return {"forward": forward, "step": lambda: torch.autograd.grad(forward(), wanted, self.dy)}

    def floor(self, milliseconds: Callable[[Step], float]) -> dict[str, float]:
        """Products alone plus bytes at the measured rate: of a forward and of a step, in both regimes, in ms."""
        experts, hidden, ffn = self.shape
        kernels = Sm90Fp8Kernels(SquaredReLU())
        shapes = (experts, ffn, hidden), (experts, hidden, ffn)
        weights = [
            kernels.quantize_weights(kernels.prepare(str(shape), torch.randn(shape, device="cuda").bfloat16()), E4M3)
            for shape in shapes
        ]
        x, dy, y = self.x.detach(), self.dy, torch.empty_like(self.dy)
        router = self.scales.detach()
        offsets, _ = kernels.offsets(self.sizes, y)
        rows = kernels.quantize(x, offsets, E4M3, weights=weights[0].inverses)
        act_input, magnitudes = kernels.fc1_fp8(rows, weights[0], None, router, offsets, x.dtype, fast=True)
        hidden_rows = kernels.quantize(
            act_input, offsets, E4M3, weights=weights[1].inverses, magnitudes=magnitudes, router=router
        )
        grads = kernels.quantize(dy, offsets, E5M2, weights=weights[1].inverses, by_column=True)
        dact = kernels.quantize(act_input, offsets, E5M2, weights=weights[0].inverses, by_column=True)
        rebuilt = kernels.rebuild(act_input, router, hidden_rows, offsets, torch.float8_e4m3fn)
        turned = kernels.turn(rows, offsets)
        dw1, dw2 = (kernels.prepare(str(shape), torch.empty(shape, device="cuda").bfloat16()) for shape in shapes)
        dx = torch.empty_like(x)

        def forward() -> None:
            kernels.fc1_fp8(rows, weights[0], None, router, offsets, x.dtype, fast=True)
            kernels.linear_fp8(hidden_rows, weights[1].rows, y, offsets, fast=True)

        def step() -> None:
            forward()
            kernels.fc2_dgrad_fp8(grads, weights[1], act_input, router, offsets, fast=False)
            kernels.wgrad_fp8(grads, rebuilt, offsets, dw2, accumulate=False, fast=False)
            kernels.linear_fp8(dact, weights[0].columns, dx, offsets, fast=False)
            kernels.wgrad_fp8(dact, turned, offsets, dw1, accumulate=False, fast=False)

        for _ in range(2):  # kernels are compiled
            step()
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        rate = 2 * source.nbytes / milliseconds(lambda: target.copy_(source))  # bytes a millisecond, read and written
        x_size, act_size, weight_size = x.numel(), act_input.numel(), 2 * experts * hidden * ffn
        # a number of bf16 is 2 bytes, read once for the magnitude and the number; what an epilogue makes is looked at there
        of_forward = x_size * (2 + 1) + act_size * (2 + 1)
        of_backward = x_size * (2 + 1 + 1) + x_size * (1 + 1) + act_size * (2 + 1) + act_size * (2 + 1 + 1)
        both_ways = weight_size * (2 + 1 + 1)
        products = {"forward": milliseconds(forward), "step": milliseconds(step)}
        nbytes = {"forward": of_forward, "step": of_forward + of_backward}
        found = {f"{kind} (ii)": products[kind] + nbytes[kind] / rate for kind in products}
        return found | {f"{kind} (i)": products[kind] + (nbytes[kind] + both_ways) / rate for kind in products}
