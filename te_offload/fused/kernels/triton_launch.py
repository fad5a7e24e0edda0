"""Launches Triton's kernels again without asking Triton which compiled kernel the arguments need.

In: kernels of ``triton.jit``, grids, positional arguments. Out: launches on the current stream. Keeps true: two calls share
a compiled kernel only where Triton compiles one for both, which is by device, dtypes, pointers and integers that are
multiples of 16, integers that are 1 or take 64 bits, arguments that are ``None``, and values of constants. Does not: pass
arguments by name; call a kernel's ``pre_run_hooks``, after its first launch.

With 17 arguments Triton's own launch takes the host some 28 us, and what one returned, called again, 15 (docs/results/,
2026-11-27, autograd in the calling thread); a layer in FP8 has ten.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

_MULTIPLE = 16  # bytes, or numbers, of which Triton makes use
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


class Relaunched:
    """A kernel, launched as ``kernel[grid](*arguments)``: a decorator over ``triton.jit``.

    Args:
        kernel: of ``triton.jit``, or of Triton's interpreter, which returns nothing to launch again.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        parameters = inspect.signature(kernel.fn).parameters.values()
        self._constant = ["constexpr" in str(one.annotation) for one in parameters]
        self._compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4) -> None:
        """``num_warps``: as Triton's."""
        key = num_warps, *self.kinds(*arguments)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*arguments, num_warps=num_warps)
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments)

    def kinds(self, *arguments: Any) -> list[Any]:
        """What a compiled kernel depends on."""
        found: list[Any] = [torch.cuda.current_device() if torch.cuda.is_available() else None]
        for argument, constant in zip(arguments, self._constant, strict=True):
            if constant or argument is None:
                found.append(argument)
            elif isinstance(argument, torch.Tensor):
                found.append((argument.dtype, argument.data_ptr() % _MULTIPLE == 0))
            elif isinstance(argument, float):
                found.append(float)
            elif argument == 1:
                found.append("1")
            else:
                found.append((_LEAST <= argument <= _MOST, argument % _MULTIPLE == 0))
        return found
