"""The demo's model trained in every recipe that the GPU has, in one picture beside bf16.

    ./run benchmarks.loss_curves [--steps 200] [--recipes none fp8 ...] [--paths fused "op by op"]
                                 [--add FILE ...] [--picture FILE.png] [--json FILE]

Each recipe is trained from the same seed on the same text with offloading, fused where there are kernels and op by op; the
picture shows the loss of each, a running mean over 10 steps. The table says the mean loss of the last 20 steps, and by how
much it differs from bf16's. ``--add`` puts the curves of earlier runs, from their JSON, before them. Those in torch
arithmetic (``tests.support.reference_losses``) begin with other weights, a CPU's, and are compared with bf16 there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from te_offload.demo.model import ModelConfig
from te_offload.demo.recipes import RECIPES
from te_offload.demo.training import TrainingConfig, train
from te_offload.fused import hopper

MEAN, LAST = 10, 20
PATHS = {"fused": "1", "op by op": "0"}
LINES = {"op by op": "--", "torch arithmetic": ":"}


def running_mean(losses: Sequence[float]) -> list[float]:
    """Of so many steps up to each."""
    return [statistics.fmean(losses[max(0, number - MEAN + 1) : number + 1]) for number in range(len(losses))]


def curves(steps: int, recipes: Sequence[str], paths: Sequence[str]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Losses by recipe and path, and why others are not there."""
    found: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    for name in recipes:
        recipe = RECIPES[name]
        available, reason = recipe.available()
        for path in paths:
            label = f"{'bf16' if recipe.make is None else name}, {path}"
            if not available:
                missing[label] = reason
                continue
            os.environ[hopper.SWITCH] = PATHS[path]
            config = TrainingConfig(
                ModelConfig(), steps=steps, device=torch.device("cuda"), dtype=torch.bfloat16, recipe=recipe
            )
            try:
                result = train(config, offload=True, progress=lambda loss: None)
            except RuntimeError as error:
                missing[label] = str(error).strip().splitlines()[-1]
                continue
            found[label] = result.losses
            print(f"{label}: {result.seconds:.1f} s, {result.bytes_out} bytes out", flush=True)
    return found, missing


def base_of(label: str, found: dict[str, list[float]]) -> str:
    """What a curve is compared with: bf16 that began with the same weights; the first one, unless in torch arithmetic."""
    alike = f"bf16, {label.split(', ')[1]}"
    return alike if "torch arithmetic" in label and alike in found else next(iter(found))


def draw(path: Path, found: dict[str, list[float]]) -> None:
    """One picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2))
    for label, losses in found.items():
        mean, base = running_mean(losses), running_mean(found[base_of(label, found)])
        line = next((style for path, style in LINES.items() if path in label), "-")
        above.plot(mean, label=label, linewidth=1.2, linestyle=line)
        differences = [100 * (ours / theirs - 1) for ours, theirs in zip(mean, base, strict=True)]
        below.plot(differences, linewidth=1.2, linestyle=line)
    above.set_ylabel(f"loss, nats a byte (mean of {MEAN} steps)")
    above.legend()
    below.set_ylabel("beside bf16, %")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    """Run, print a table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES), help="which; default: all")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS), help="which; default: both")
    parser.add_argument("--add", nargs="+", type=Path, default=[], help="JSON of earlier runs")
    parser.add_argument("--picture", type=Path, help="where to draw")
    parser.add_argument("--json", type=Path, help="write the losses here")
    arguments = parser.parse_args()
    if arguments.recipes and not torch.cuda.is_available():
        raise SystemExit("benchmarks.loss_curves needs a CUDA device; torch sees none here.")
    found, missing = curves(arguments.steps, arguments.recipes, arguments.paths)
    earlier = [json.loads(path.read_text()) for path in arguments.add]
    found = {label: losses for one in earlier for label, losses in one["losses"].items()} | found
    missing = {label: why for one in earlier for label, why in one["missing"].items() if label not in found} | missing
    last = {label: statistics.fmean(losses[-LAST:]) for label, losses in found.items()}
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "from an earlier run"
    print(f"\n{where}, torch {torch.__version__}; {arguments.steps} steps\n")
    print(f"| recipe | first loss | mean of the last {LAST} | beside bf16 |\n|---|---|---|---|")
    for label, losses in found.items():
        beside = 100 * (last[label] / last[base_of(label, found)] - 1)
        print(f"| {label} | {losses[0]:.4f} | {last[label]:.4f} | {beside:+.2f}% |")
    for label, reason in missing.items():
        print(f"\n{label}: not there: {reason}")
    if arguments.picture:
        draw(arguments.picture, found)
    if arguments.json:
        result: dict[str, Any] = {"schema": "1.0", "losses": found, "missing": missing}
        arguments.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
