"""The command line: `te-offload demo`, `te-offload doctor`, `te-offload explain`.

In: arguments. Out: text, files, an exit status (0: done; 1: what was checked does not hold; 2: the arguments are wrong).
Keeps true: this room alone prints. Does not: compute.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from te_offload.errors import OffloadError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Selective activation offloading beside Transformer Engine."
)


@app.command()
def demo(
    no_offload: Annotated[str, typer.Option(help="Slots to keep on the device, e.g. fc1_input,act_input.")] = "",
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each run.")] = 48,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    min_bytes: Annotated[str, typer.Option(help="Smaller slots stay on the device.")] = "64KiB",
    recipe: Annotated[
        str, typer.Option(help="Of the grouped MLPs: none, fp8, fp8-delayed, fp8-block, mxfp8, nvfp4.")
    ] = "none",
    recompute_act_input: Annotated[
        bool, typer.Option(help="With offloading, compute FC1 again instead of saving its output, where it runs fused.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.png.")] = Path("te-offload-demo"),
) -> None:
    """Train a small MoE language model on real text, with and without offloading, and compare every bit."""
    from te_offload.cli.demo import run_demo

    raise typer.Exit(
        run_demo(
            no_offload=no_offload,
            steps=steps,
            device=device,
            min_bytes=min_bytes,
            recipe=recipe,
            recompute_act_input=recompute_act_input,
            out=out,
        )
    )


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what this machine can do, and why not the rest."""
    from te_offload.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json))


@app.command()
def explain(
    hidden: Annotated[int, typer.Option(min=1, help="Columns of the input of FC1.")] = 2048,
    ffn: Annotated[int, typer.Option(min=1, help="Columns of the input of FC2.")] = 1408,
    bias: Annotated[bool, typer.Option(help="Whether FC1 and FC2 have biases.")] = False,
    glu_interleave_size: Annotated[
        int | None,
        typer.Option(min=1, help="Columns of a block of each half, of gated activations; none: one block each."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say which grouped MLPs a fused op takes on this machine, and why not the others."""
    from te_offload.cli.explain import run_explain

    raise typer.Exit(run_explain(hidden=hidden, ffn=ffn, bias=bias, interleave=glu_interleave_size, as_json=as_json))


def main() -> None:
    """Entry point; an `OffloadError` becomes one line and status 2."""
    try:
        app()
    except OffloadError as error:
        typer.echo(f"te-offload: {error}", err=True)
        sys.exit(2)
