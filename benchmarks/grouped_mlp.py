"""One grouped MLP, forward and backward: ours fused, Transformer Engine's ops, torch's `_grouped_mm`, our kernels bare.

    ./run benchmarks.grouped_mlp [--experts 64 --hidden 2048 --ffn 1408 --tokens 32768] [--skew last|first] [--rounds 20]
                                 [--calls 4] [--lead 0] [--json FILE] [--single-grouped-weight]
                                 [--recipe fp8|fp8-delayed|fp8-block] [--activation srelu|swiglu] [--bias] [--only TEXT ...]

All ways run in one process with the same weights and inputs, interleaved, column by column, shuffled anew each time: what
runs before a way decides the card's clock, and an eager way that waits for the host lets it rest. Each number is the median
over the rounds of a few calls in a row (`--calls`), by events on the GPU. The first call of a row finds the GPU idle, which
an eager row of few calls shows; with many calls in a row the GPU has no rest, and runs at its sustained clock. With
`--lead` a row's first calls are not counted: the others find the GPU at work, as they do in training. `graph` is
the same forward and backward captured and replayed, `one thread` the eager one with autograd working in the calling thread
(`torch.autograd.set_multithreading_enabled(False)`) and not in one of its own. `host` is what a forward takes the host, by
its own clock, with the GPU idle before it: after the other ways' turns, which throw it out of the host's caches, and
`again` right after itself.
`bare kernels` are the launches of the fused op without autograd and Transformer Engine around them. `QuACK's GEMMs` are
the same six products with QuACK's own host code, on packed weights, with our tiles and without any activation: the floor.
QuACK gives tiles out from the start unless asked to have them taken one by one, from counts that a memset then sets to
zero first. `QuACK with activations` are its calls that do what the fused op's launches do (`benchmarks.quack_calls`), in
our tiles or in those that its own tuner finds. With `--skew` one expert takes half of the tokens and a quarter of the
experts nothing; our ops and Transformer Engine's with even routing are measured beside that. Transformer Engine runs in the
best way that the loaded cuBLAS gives it; run it with the newest one too. With a recipe the ways are those of
`benchmarks.fp8_mlp`.
With `--only` those run whose name has a text: of large experts, all ways' weights fill a card of 80 GB. With `--bias` both
linears have biases, FC2's times the router's scales, and only ours and Transformer Engine's run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te

from benchmarks import quack_calls
from te_offload import ops
from te_offload.demo.recipes import RECIPES
from te_offload.fused import hopper, machine
from te_offload.fused.kernels import sm90, sm90_glu, sm90_tiles
from te_offload.fused.kernels.interface import Gate, Gated, SquaredReLU
from te_offload.ops import te_adapter
from te_offload.units import format_bytes

CALLS = 4
HOST, AGAIN, ONE_THREAD = "host", "host again", "step, one thread"
KINDS = ("forward", "forward graph", "step", ONE_THREAD, "graph", HOST, AGAIN)  # the columns
Step = Callable[[], Any]


class Case:
    """One shape: weights, inputs, and the ways to compute it.

    Args:
        experts, hidden, ffn, tokens: the shape. skew: see `split`.
        single: each op has one grouped weight, not one an expert. gated: SwiGLU, else squared ReLU. bias: both ops have
            biases, FC2's times the router's scales.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        ffn: int,
        tokens: int,
        *,
        skew: str | None,
        single: bool,
        gated: bool = False,
        bias: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.bias = bias
        size: dict[str, Any] = {"bias": bias, "device": "cuda", "dtype": torch.bfloat16}
        if single:
            size["single_grouped_weight"] = True
        self.tokens, self.hidden, self.ffn, self.gated = tokens, hidden, ffn, gated
        wide = 2 * ffn if gated else ffn
        self.fused = te.ops.Sequential(
            ops.GroupedLinear(experts, hidden, wide, **size),
            ops.ScaledSwiGLU() if gated else ops.ScaledSReLU(),
            ops.GroupedLinear(experts, ffn, hidden, **size, scale_bias=bias),
        )
        self.plain = te.ops.Sequential(
            te.ops.GroupedLinear(experts, hidden, wide, **size),
            te.ops.ScaledSwiGLU() if gated else te.ops.ScaledSReLU(),
            te.ops.GroupedLinear(experts, ffn, hidden, **size, scale_bias=bias),
        )
        if not single:
            for ours, theirs in zip(self.fused.parameters(), self.plain.parameters(), strict=True):
                theirs.data = ours.data
        shapes = (experts, wide, hidden), (experts, hidden, ffn)
        packed = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[2] ** -0.5) for shape in shapes]
        self.weights1, self.weights2 = (list(weights.unbind(0)) for weights in packed)
        self.x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.scales = torch.rand(tokens, device="cuda").requires_grad_()
        self.dy = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.sizes = torch.tensor(split(experts, tokens, skew=skew), device="cuda")
        self.even = torch.tensor(split(experts, tokens, skew=None), device="cuda") if skew else None
        self._packed = [weights.requires_grad_() for weights in packed]
        tiles = sm90_tiles.tiles_of(quick_memory=machine.has_quick_memory())
        if gated:
            self._kernels: sm90.Sm90Kernels = sm90_glu.Sm90GluKernels(Gated(Gate.SWIGLU), tiles)
        else:
            self._kernels = sm90.Sm90Kernels(SquaredReLU(), tiles)

    def forward_of(self, module: torch.nn.Module, sizes: torch.Tensor | None = None) -> Step:
        """A forward with what autograd needs; ``sizes``: other ones than the case's."""
        sizes = self.sizes if sizes is None else sizes
        of_bias = (self.scales,) if self.bias else ()
        return lambda: module(self.x, sizes, self.scales, sizes, *of_bias)

    def step_of(self, module: torch.nn.Module, sizes: torch.Tensor | None = None) -> Step:
        """A forward and backward."""
        forward = self.forward_of(module, sizes)
        wanted: list[torch.Tensor] = []

        def step() -> Any:
            if not wanted:
                forward()  # which makes grouped weights
                wanted.extend([self.x, self.scales, *module.parameters()])
            return torch.autograd.grad(forward(), wanted, self.dy)

        return step

    def ways_of(self, module: torch.nn.Module, sizes: torch.Tensor | None = None) -> dict[str, Step]:
        """Both."""
        return {"forward": self.forward_of(module, sizes), "step": self.step_of(module, sizes)}

    def grouped_mm_forward(self) -> torch.Tensor:
        """The grouped GEMM of torch, with packed weights."""
        ends = self.sizes.cumsum(0, dtype=torch.int32)
        act = torch._grouped_mm(self.x, self._packed[0].mT, offs=ends)
        if self.gated:
            gate, linear = act.chunk(2, 1)
            act = torch.nn.functional.silu(gate) * linear
        else:
            act = torch.relu(act).square()
        act = (act * self.scales[:, None]).to(torch.bfloat16)
        output: torch.Tensor = torch._grouped_mm(act, self._packed[1].mT, offs=ends)
        return output

    def grouped_mm_step(self) -> Any:
        """The same, forward and backward."""
        return torch.autograd.grad(self.grouped_mm_forward(), [self.x, self.scales, *self._packed], self.dy)

    def bare(self) -> Any:
        """The fused op's launches alone."""
        kernels, x = self._kernels, self.x.detach()
        act_input, offsets = self.bare_forward()
        dact, fc2_input, _, orders = kernels.fc2_dgrad(
            self.dy, kernels.prepare("fc2", self.weights2), act_input, self.scales.detach(), offsets
        )
        dw2 = x.new_empty(len(self.weights2), self.hidden, self.ffn)
        kernels.wgrad(
            self.dy, fc2_input, offsets, kernels.prepare("dw2", dw2), accumulate=False, order=orders.fc2_wgrad
        )
        dx, dw1 = torch.empty_like(x), torch.empty_like(self._packed[0])
        weights, dweights = kernels.prepare("fc1", self.weights1), kernels.prepare("dw1", dw1)
        order, count = orders.fc1_wgrad, orders.fc1_dgrad
        kernels.fc1_backward(dact, x, weights, offsets, dx, dweights, accumulate=False, order=order, count=count)
        return dw1, dw2

    def bare_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, forward alone."""
        kernels, x = self._kernels, self.x.detach()
        y = torch.empty_like(x)
        offsets, counts = kernels.offsets(self.sizes, y)
        weights1, weights2 = kernels.prepare("fc1", self.weights1), kernels.prepare("fc2", self.weights2)
        act_input, fc2_input = kernels.fc1(x, weights1, None, self.scales.detach(), offsets, counts.fc1)
        kernels.fc2(fc2_input, weights2, None, None, offsets, y, counts.fc2)
        return act_input, offsets

    @functools.cached_property
    def _for_quack(self) -> tuple[quack_calls.Tensors, quack_calls.Results]:
        """What QuACK's calls work on, and write to."""
        w1, w2 = (weights.detach() for weights in self._packed)
        act_input, offsets = self.bare_forward()
        scales = self.scales.detach()
        dact_input, fc2_input, *_ = self._kernels.fc2_dgrad(
            self.dy, self._kernels.prepare("fc2", self.weights2), act_input, scales, offsets
        )
        x = self.x.detach()
        tensors = quack_calls.Tensors(x, self.dy, w1, w2, act_input, dact_input, fc2_input, scales, offsets)
        return tensors, quack_calls.Results.of(tensors)

    def quack(self, *, one_by_one: bool = False) -> dict[str, Step]:
        """The six products, with QuACK's plain epilogue."""
        return quack_calls.products_alone(*self._for_quack, one_by_one=one_by_one)

    def quack_with_activations(self, *, own_tiles: bool, one_by_one: bool) -> dict[str, Step]:
        """QuACK's calls with the activation in their epilogues."""
        ways: dict[str, Any] = {"gated": self.gated, "own_tiles": own_tiles, "one_by_one": one_by_one}
        return quack_calls.with_activations(*self._for_quack, **ways)


def split(experts: int, tokens: int, *, skew: str | None) -> list[int]:
    """Tokens of each expert: even, or the ``"first"`` or ``"last"`` one takes half and a quarter of them nothing."""
    if skew is None:
        return [tokens // experts + (number < tokens % experts) for number in range(experts)]
    idle = experts // 4
    busy = experts - idle - 1
    rest = tokens - tokens // 2
    sizes = [tokens // 2, *[0] * idle, *[rest // busy + (number < rest % busy) for number in range(busy)]]
    return sizes if skew == "first" else sizes[::-1]


def milliseconds(step: Step, calls: int = CALLS, lead: int = 0) -> float:
    """GPU time of one of some calls in a row, which begins with ``lead`` that are not counted."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for _ in range(lead):
        step()
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / calls


def host_milliseconds(step: Step) -> float:
    """Host time of one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = step()
    spent = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    del result
    return spent


def without_graph(results: Any) -> Any:
    """A step's results without what autograd knows of them.

    While the graph of a captured forward is there, autograd's nodes of the parameters are tied to the stream of its
    capture, and in each eager backward that stream and the current one wait for each other, parameter by parameter.
    """
    if isinstance(results, torch.Tensor):
        return results.detach()
    return tuple(map(without_graph, results)) if type(results) is tuple else results


def captured(step: Step) -> Step:
    """The step as a CUDA graph. A replay gives what `without_graph` makes of the results.

    Raises:
        RuntimeError: it cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = without_graph(step())

    def replay() -> Any:
        graph.replay()
        return keep

    return replay


def dense_ways(case: Case, only: Sequence[str]) -> dict[str, dict[str, Step]]:
    """In bf16; ``only`` those with one of these texts in their name."""
    ways: dict[str, Callable[[], dict[str, Step]]] = {}
    for name, module in (("te_offload, fused", case.fused), ("Transformer Engine", case.plain)):
        ways[name] = functools.partial(case.ways_of, module)
        if case.even is not None:
            ways[f"{name}, even routing"] = functools.partial(case.ways_of, module, case.even)
    with_activations = functools.partial(functools.partial, case.quack_with_activations)
    without_bias: dict[str, Callable[[], dict[str, Step]]] = {
        "torch._grouped_mm, packed weights": lambda: {"forward": case.grouped_mm_forward, "step": case.grouped_mm_step},
        "bare kernels of te_offload": lambda: {"forward": case.bare_forward, "step": case.bare},
        "QuACK's GEMMs alone, packed weights": case.quack,
        "QuACK's GEMMs, tiles one by one": functools.partial(case.quack, one_by_one=True),
        "QuACK with activations, our tiles, one by one": with_activations(own_tiles=False, one_by_one=True),
        "QuACK with activations, its tiles": with_activations(own_tiles=True, one_by_one=False),
        "QuACK with activations, its tiles, one by one": with_activations(own_tiles=True, one_by_one=True),
    }
    if not case.bias:
        ways |= without_bias
    return {name: make() for name, make in ways.items() if any(text in name for text in only)}


@contextlib.contextmanager
def memory_for(shape: str) -> Iterator[None]:
    """Raises `SystemExit`, which says what to do, where the ways of a shape fill the card."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SystemExit(
            f"{shape}: the weights, results and graphs of all ways do not fit the card. Name fewer with --only (with"
            f" a recipe as '(ii)'), or give fewer --tokens. {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def measure(ways: dict[str, dict[str, Step]], rounds: int, calls: int, lead: int) -> dict[tuple[str, str], float]:
    """Medians, in milliseconds, by way and kind."""
    times: dict[tuple[str, str], list[float]] = {}
    shuffled = random.Random(0)
    names = list(ways)
    for _ in range(rounds + 2):
        for kind in KINDS:
            shuffled.shuffle(names)
            for name in names:
                by_host = kind in (HOST, AGAIN)
                step = ways[name].get("forward" if by_host else "step" if kind == ONE_THREAD else kind)
                if step is not None:
                    if kind == AGAIN:
                        host_milliseconds(step)
                    with torch.autograd.set_multithreading_enabled(kind != ONE_THREAD):
                        spent = host_milliseconds(step) if by_host else milliseconds(step, calls, lead)
                    times.setdefault((name, kind), []).append(spent)
    return {key: statistics.median(values[2:]) for key, values in times.items()}


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("experts", 64),
        ("hidden", 2048),
        ("ffn", 1408),
        ("tokens", 32768),
        ("rounds", 20),
        ("calls", CALLS),
        ("lead", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--skew", choices=("first", "last"), help="which expert takes half; a quarter takes nothing")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--single-grouped-weight", action="store_true", help="one weight an op, theirs and ours")
    parser.add_argument(
        "--recipe", choices=("fp8", "fp8-delayed", "fp8-block"), help="quantize, with the demo's recipe of that name"
    )
    parser.add_argument("--activation", choices=("srelu", "swiglu"), default="srelu")
    parser.add_argument("--bias", action="store_true", help="of both linears, FC2's times the router's scales")
    parser.add_argument("--only", nargs="+", default=[""], help="the ways with one of these texts in their name")
    arguments = parser.parse_args()
    gated = arguments.activation == "swiglu"
    os.environ |= {hopper.SWITCH: "1", "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
    single = arguments.single_grouped_weight
    size = arguments.experts, arguments.hidden, arguments.ffn, arguments.tokens
    shape = f"E{arguments.experts} H{arguments.hidden} F{arguments.ffn} T{arguments.tokens}"
    floor: dict[str, float] = {}
    offloaded: dict[str, int] = {}
    if arguments.recipe and arguments.bias:
        parser.error("--bias is measured without a recipe.")
    with memory_for(shape):
        if arguments.recipe:
            from benchmarks.fp8_mlp import Fp8Case

            make = RECIPES[arguments.recipe].make
            assert make is not None
            sizes = split(arguments.experts, arguments.tokens, skew=arguments.skew)
            quantized = Fp8Case(*size, sizes, make(), gated=gated)
            ways = quantized.ways(arguments.only)
            floor = quantized.floor(milliseconds) if quantized.has_floor else {}
            offloaded = quantized.offloaded()
        else:
            case = Case(*size, skew=arguments.skew, single=single, gated=gated, bias=arguments.bias)
            ways = dense_ways(case, arguments.only)
    if not ways:
        raise SystemExit(f"No way has one of {arguments.only} in its name.")
    failures = {}
    for name, steps in list(ways.items()):
        try:
            for step in list(steps.values()):
                step()
            torch.cuda.synchronize()
        except RuntimeError as error:
            failures[name] = _first_line(error)
            del ways[name]
            continue
        for kind, of in (("forward graph", "forward"), ("graph", "step")):
            try:
                steps[kind] = captured(steps[of])
            except RuntimeError as error:
                failures[f"{name}, {kind}"] = _first_line(error)
                torch.cuda.synchronize()
                break
    with memory_for(shape):
        medians = measure(ways, arguments.rounds, arguments.calls, arguments.lead)
    number = te_adapter.cublaslt_version()
    skewed = f", skewed routing, the {arguments.skew} expert takes half" if arguments.skew else ""
    skewed += (", one grouped weight" if single else "") + (", SwiGLU" if gated else "")
    skewed += ", biases" if arguments.bias else ""
    led = f" after {arguments.lead} uncounted" if arguments.lead else ""
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cublaslt {number // 10000}.{number // 100 % 100}"
    )
    print(
        f"{shape} {arguments.recipe or 'bf16'}{skewed}, {arguments.rounds} rounds of {arguments.calls} calls{led}; ms\n"
    )
    print("| way | forward | as a graph | forward + backward | one thread | as a graph | host, forward | again |")
    print("|---|---|---|---|---|---|---|---|")
    for name in ways:
        cells = (medians.get((name, kind)) for kind in KINDS)
        print(f"| {name} | {' | '.join('-' if cell is None else f'{cell:.3f}' for cell in cells)} |")
    for kind, spent in floor.items():
        print(f"\nfloor of a {kind}: {spent:.3f}")
    if offloaded:
        print(f"\nout in a step: {', '.join(f'{name} {format_bytes(count)}' for name, count in offloaded.items())}")
    for name, why in failures.items():
        print(f"\n{name}: {why}")
    if arguments.json:
        rows = [{"way": name, "kind": kind, "ms": value} for (name, kind), value in medians.items()]
        result = {
            "schema": "1.7",
            "shape": shape,
            "calls": arguments.calls,
            "lead": arguments.lead,
            "skew": arguments.skew,
            "single": single,
            "activation": arguments.activation,
            "bias": arguments.bias,
            "only": arguments.only,
            "recipe": arguments.recipe,
            "floor": floor,
            "offloaded": offloaded,
            "rows": rows,
            "failures": failures,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
