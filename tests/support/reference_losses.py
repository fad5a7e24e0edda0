"""The demo's model trained on the CPU in torch arithmetic, in recipes for which there is no card: losses as JSON.

    ./run tests.support.reference_losses --recipes none mxfp8 nvfp4 [--steps 200] --json FILE

The fused op quantizes as its reference kernels do; nothing of Transformer Engine's kernels runs (`te_on_cpu`). The file is
of the form that ``benchmarks.loss_curves --add`` takes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from te_offload.demo.model import ModelConfig
from te_offload.demo.recipes import RECIPES
from te_offload.demo.training import TrainingConfig, train
from te_offload.fused import hopper
from tests.support import te_on_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    losses: dict[str, list[float]] = {}
    with pytest.MonkeyPatch.context() as patch:
        te_on_cpu.unfused(patch, grouped=False)
        patch.setenv(hopper.SWITCH, "reference")
        for name in arguments.recipes:
            recipe = RECIPES[name]
            config = TrainingConfig(
                ModelConfig(),
                steps=arguments.steps,
                device=torch.device("cpu"),
                dtype=torch.bfloat16,
                recipe=recipe,
            )
            result = train(config, offload=True, progress=lambda loss: None)
            losses[f"{'bf16' if recipe.make is None else name}, torch arithmetic"] = result.losses
            print(f"{name}: {result.seconds:.1f} s, {result.bytes_out} bytes out", flush=True)
    arguments.json.write_text(json.dumps({"schema": "1.0", "losses": losses, "missing": {}}) + "\n")


if __name__ == "__main__":
    main()
