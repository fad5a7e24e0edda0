"""Quantization recipes of Transformer Engine by short names: where each can run, and what it asks of split sizes.

In: a name, and a device. Out: a `Recipe`. Keeps true: what a device cannot run is refused with Transformer Engine's own
reason. Does not: quantize.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe

from te_offload.errors import ArgumentError


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        make: Transformer Engine's; ``None``: nothing is quantized.
        check: name of Transformer Engine's function that says whether the GPU here can run it, and why not.
        rows: of which an expert's number of tokens must be a multiple. (FP8 GEMMs take multiples of 16. For formats whose
            scales belong to blocks of tokens it is 128, which their fused kernels ask too.)
    """

    make: Callable[[], Any] | None = None
    check: str = ""
    rows: int = 1

    def available(self) -> tuple[bool, str]:
        """Whether the GPU here can run it, and if not, why."""
        found: tuple[bool, str] = getattr(te, self.check)(return_reason=True) if self.check else (True, "")
        return found


RECIPES: dict[str, Recipe] = {
    "none": Recipe(),
    "fp8": Recipe(te_recipe.Float8CurrentScaling, "is_fp8_available", 16),
    "fp8-delayed": Recipe(te_recipe.DelayedScaling, "is_fp8_available", 16),
    "fp8-block": Recipe(te_recipe.Float8BlockScaling, "is_fp8_block_scaling_available", 128),
    "mxfp8": Recipe(te_recipe.MXFP8BlockScaling, "is_mxfp8_available", 128),
    "nvfp4": Recipe(te_recipe.NVFP4BlockScaling, "is_nvfp4_available", 128),
}


def choose_recipe(name: str, device: torch.device) -> Recipe:
    """The recipe of a name, if a device can run it.

    Raises:
        ArgumentError: no such name; or the device cannot.
    """
    if name not in RECIPES:
        raise ArgumentError(f"--recipe must be one of {', '.join(RECIPES)}, but is {name!r}.")
    recipe = RECIPES[name]
    if recipe.make is None:
        return recipe
    if device.type != "cuda":
        raise ArgumentError(
            f"--recipe {name} quantizes on a GPU, but the device is {device}. Leave the recipe out there."
        )
    available, reason = recipe.available()
    if not available:
        raise ArgumentError(f"--recipe {name} does not run on {torch.cuda.get_device_name()}: {reason}")
    return recipe
