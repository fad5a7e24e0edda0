"""`te-offload demo`: trains three times from one seed, shows what was offloaded, and compares every bit.

In: the options. Out: tables and curves on the terminal, `report.json`, `report.png`, the exit status. Keeps true: status
0 only if a second run without offloading gave the bits of the first, the run with offloading gave them too, and bytes
moved. Does not: train or draw itself.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from te_offload.demo.model import ModelConfig
from te_offload.demo.recipes import choose_recipe
from te_offload.demo.training import RunResult, TrainingConfig, first_difference, train
from te_offload.errors import ArgumentError
from te_offload.ops import te_adapter
from te_offload.report.as_json import SCHEMA, step_as_dict
from te_offload.report.picture import draw
from te_offload.report.table import slot_table, totals
from te_offload.slots import SlotName
from te_offload.units import format_bytes, parse_bytes

_CHOICES = (SlotName.FC1_INPUT, SlotName.ACT_INPUT, SlotName.FC2_INPUT)


def parse_slots(text: str) -> frozenset[SlotName]:
    """Slot names from ``"fc1_input,act_input"``.

    Raises:
        ArgumentError: a name is no slot of a grouped MLP.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {slot.value: slot for slot in _CHOICES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            f"--no-offload: {unknown[0]!r} is no slot of a grouped MLP. Choose from {', '.join(known)}."
        )
    return frozenset(known[name] for name in names)


def choose_device(text: str) -> torch.device:
    """The device for ``cpu``, ``cuda`` or ``auto``.

    Raises:
        ArgumentError: another word, or ``cuda`` without a GPU.
    """
    if text not in ("cpu", "cuda", "auto"):
        raise ArgumentError(f"--device must be cpu, cuda or auto, but is {text!r}.")
    if text == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda, but torch sees no GPU here. Use --device cpu.")
    return torch.device("cuda" if text == "cuda" or (text == "auto" and torch.cuda.is_available()) else "cpu")


def run_demo(
    *,
    no_offload: str,
    steps: int,
    device: str,
    min_bytes: str,
    recipe: str,
    recompute_act_input: bool = False,
    out: Path,
) -> int:
    """Run the demo; returns the exit status. ``recompute_act_input``: in the run with offloading alone."""
    console = Console()
    target = choose_device(device)
    config = TrainingConfig(
        model=ModelConfig(keep=parse_slots(no_offload), recompute_act_input=recompute_act_input),
        steps=steps,
        device=target,
        dtype=torch.bfloat16 if target.type == "cuda" else torch.float32,
        min_bytes=parse_bytes(min_bytes, "--min-bytes"),
        recipe=choose_recipe(recipe, target),
    )
    place = torch.cuda.get_device_name() if target.type == "cuda" else "the CPU"
    console.print(
        f"Training a byte-level language model on {place}: {config.model.layers} layers, {config.model.experts} experts, "
        f"top {config.model.top_k}, recipe {recipe}, on the texts of pydoc, {steps} steps, three times from seed "
        f"{config.seed}.",
        highlight=False,
    )
    first, second, offloaded = _train_three_times(console, config)
    assert second.record is not None and offloaded.record is not None

    console.print(
        f"\nLoss   {_curve(offloaded.losses)}   {offloaded.losses[0]:.3f} -> {offloaded.losses[-1]:.3f} nats a byte"
    )
    for label, run in (("without", second), ("with", offloaded)):
        sizes = [moment.nbytes for moment in run.record.residency] if run.record else []
        bar = _curve(sizes, 32)
        console.print(f"Saved on the device over the last step, {label:>7}: {bar} at most {format_bytes(max(sizes))}")
    console.print()
    console.print(slot_table(offloaded.record, console.width))
    console.print(totals(offloaded.record), highlight=False, soft_wrap=True)

    checks = {
        "a second run without offloading gives the same bits": first_difference(first, second),
        "the run with offloading gives the same bits": first_difference(first, offloaded),
        "bytes were moved out and back": None if offloaded.bytes_out and offloaded.bytes_back else "the bytes moved",
    }
    _write(out, config, recipe, checks, first, second, offloaded)
    console.print(f"\nWrote {out / 'report.json'} and {out / 'report.png'}")
    for check, difference in checks.items():
        console.print(
            f"[green]yes[/] {check}" if difference is None else f"[red]NO[/]  {check}: differs in {difference}"
        )
    return 1 if any(checks.values()) else 0


def _train_three_times(console: Console, config: TrainingConfig) -> tuple[RunResult, RunResult, RunResult]:
    saving = replace(config, model=replace(config.model, recompute_act_input=False))
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    runs = []
    with Progress(*columns, console=console) as bar:
        for label, offload in (("without offload", None), ("without offload, again", False), ("with offload", True)):
            task = bar.add_task(label, total=config.steps, loss="")

            def advance(loss: float, task: TaskID = task) -> None:
                bar.update(task, advance=1, loss=f"{loss:.3f}")

            runs.append(train(config if offload else saving, offload=offload, progress=advance))
    return runs[0], runs[1], runs[2]


def _curve(values: list[Any], width: int = 48) -> str:
    """Values as a row of block characters."""
    picked = [values[index * (len(values) - 1) // max(width - 1, 1)] for index in range(min(width, len(values)))]
    if len(values) > width:
        picked = [values[index * (len(values) - 1) // (width - 1)] for index in range(width)]
    low, high = min(picked), max(picked)
    return "".join("▁▂▃▄▅▆▇█"[int((value - low) / ((high - low) or 1) * 7)] for value in picked)


def _write(
    out: Path,
    config: TrainingConfig,
    recipe: str,
    checks: dict[str, str | None],
    first: RunResult,
    second: RunResult,
    offloaded: RunResult,
) -> None:
    assert second.record is not None and offloaded.record is not None
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "schema": SCHEMA,
        "command": "te-offload demo",
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformer_engine": te_adapter.installed_version(),
        },
        "device": torch.cuda.get_device_name() if config.device.type == "cuda" else "cpu",
        "steps": config.steps,
        "seed": config.seed,
        "recipe": recipe,
        "dtype": str(config.dtype).removeprefix("torch."),
        "recompute_act_input": config.model.recompute_act_input,
        "kept_slots": sorted(slot.value for slot in config.model.keep),
        "checks": {check: {"holds": found is None, "difference": found} for check, found in checks.items()},
        "losses": offloaded.losses,
        "seconds": {"without": first.seconds, "without_again": second.seconds, "with": offloaded.seconds},
        "cuda_peak_bytes": {"without_again": second.cuda_peak, "with": offloaded.cuda_peak},
        "bytes_out": offloaded.bytes_out,
        "bytes_back": offloaded.bytes_back,
        "last_step_without": step_as_dict(second.record),
        "last_step_with": step_as_dict(offloaded.record),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(out / "report.png", offloaded.losses, second.record, offloaded.record)
