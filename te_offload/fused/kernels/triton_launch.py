"""Launches Triton's kernels again without asking Triton which compiled kernel the arguments need.

In: kernels of ``triton.jit``, grids, positional arguments. Out: launches on the current stream. Keeps true: two calls share
a compiled kernel only where Triton compiles one for both, which is by device (that of the tensors, which is the current
one), dtypes, pointers and integers that are multiples of 16, integers that are 1 or take 64 bits, arguments that are
``None``, and values of constants. Does not: pass arguments by name; call a kernel's ``pre_run_hooks`` after its first
launch.

With 17 arguments Triton's own launch takes the host some 28 us, and what one returned, called again, 15 (docs/results/,
2026-11-27, autograd in the calling thread); a layer in FP8 has nine.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

_MULTIPLE = 16  # bytes, or numbers, of which Triton makes use
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


class Relaunched:
    """A kernel, launched as ``kernel[grid](*arguments)``: a decorator over ``triton.jit``.

    Args:
        kernel: of ``triton.jit``, whose constants come last; or of Triton's interpreter, which returns nothing to launch
            again.

    Raises:
        TypeError: it has an argument behind a constant.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        constant = ["constexpr" in str(one.annotation) for one in inspect.signature(kernel.fn).parameters.values()]
        self._variables = constant.index(True) if True in constant else len(constant)
        if False in constant[self._variables :]:
            raise TypeError(f"{kernel.fn.__name__} has an argument behind a constant; put constants last.")
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
        """What a compiled kernel depends on, one value an argument."""
        found: list[Any] = []
        for argument in arguments[: self._variables]:
            kind = type(argument)
            if kind is int:
                if argument == 1:
                    found.append("1")
                else:
                    found.append((_LEAST <= argument <= _MOST, argument % _MULTIPLE == 0))
            elif argument is None or kind is float:
                found.append(kind)
            else:
                found.append((argument.dtype, argument.data_ptr() % _MULTIPLE == 0, argument.get_device()))
        found += arguments[self._variables :]
        return found
