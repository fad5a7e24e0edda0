"""What a user holds to have layers replayed as graphs, each forward and each backward one of its own.

In: layers, and the session that offloads what they save. Out: the same numbers, fewer launches, a report. Keeps true: what
lies between the layers runs eagerly, hooks of the layers too; nothing is captured before its warm-up. Does not: capture
functions that are no module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch

from te_offload.errors import ArgumentError, ArgumentTypeError, CaptureError
from te_offload.graphs.layers.ground import Ground
from te_offload.graphs.layers.scope import HOOKS, MISMATCHES, LayerScope, session_inside
from te_offload.graphs.states import CaptureState
from te_offload.offload.session import OffloadSession
from te_offload.units import format_bytes

_DEVICES = ("cuda",)


def capture_layers(
    layers: torch.nn.Module | Iterable[torch.nn.Module] | Mapping[str, torch.nn.Module],
    *,
    session: OffloadSession | None = None,
    warmup: int = 3,
    on_mismatch: str = "raise",
    on_overflow: str = "raise",
    delay_commits: bool = False,
    virtual: bool = True,
    quantized: bool = True,
    on_hooks: str = "eager",
) -> LayerGraphs:
    """Have each layer's forward and backward replayed as a CUDA graph, from its fourth forward on.

    A layer is any module: attention, a router, a router with what precedes it, experts, a whole transformer layer. Its
    forward takes and returns tensors, nested as it likes, and other values, which are part of the graph. Its parameters'
    gradients are returned by the graphs, and accumulated, hooked and reduced outside of them as ever.

    Args:
        layers: modules, by themselves or by name; a ``ModuleList`` is several, any other module one.
        session: which offloads the layers, or what encloses them. It takes saved tensors between the graphs, and they come
            back to the addresses that the graphs know. What is an input of a graph stays (`Reason.CROSSES_BORDER`).
        warmup: eager forwards with gradients before a layer is captured, one or more.
        on_mismatch: for inputs of another kind, or parameters that moved: ``"raise"`` an `InputMismatchError`,
            ``"recapture"`` after a new warm-up, or run ``"eager"`` this time.
        on_overflow: for split sizes on the GPU that ask for more rows than a grouped linear's input has: ``"raise"`` a
            `RowOverflowError`, or ``"report"`` it, as `capture` does.
        delay_commits: have the session queue a layer's copies out only when the next layer's graph has been launched. The
            report says what host time that took from before the launch, and how much later the copies were queued.
        virtual: give memory that a layer does not use back, by virtual memory of the GPU. Where there is none, or not
            asked for, all memory of the graphs stays, and no slot in them goes.
        quantized: take calls under ``te.autocast`` too, where the recipe has no state outside of the layer: current
            scaling, FP8 by blocks, MXFP8, NVFP4 without stochastic rounding (the last two have run on no card). Another
            recipe is another call. ``False``: they run eagerly.
        on_hooks: for hooks of modules inside of a layer, which no replay calls (those of the layer itself run as ever): run
            it ``"eager"`` while it has any, or ``"ignore"`` them, as is right for hooks whose work is all on the GPU.
            Megatron-core's that wait for parameters are called before each replay, and keep no layer eager.

    Raises:
        ArgumentError: no layers, a layer twice or inside another, one inside of which a session is attached, no warm-up, or
            an unknown ``on_mismatch``, ``on_overflow`` or ``on_hooks``.
        ArgumentTypeError: something that is no module.
        CaptureError: the layers are not on a GPU.
    """
    named = _named(layers)
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
        raise ArgumentError(f"warmup must be 1 or more runs, since kernels are loaded in them, but is {warmup!r}.")
    if on_mismatch not in MISMATCHES:
        raise ArgumentError(f"on_mismatch must be one of {', '.join(MISMATCHES)}, but is {on_mismatch!r}.")
    if on_hooks not in HOOKS:
        raise ArgumentError(f"on_hooks must be one of {', '.join(HOOKS)}, but is {on_hooks!r}.")
    devices = {parameter.device for module in named.values() for parameter in module.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in _DEVICES:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        raise CaptureError(f"Nothing to capture: the layers are on {found}. Graphs of layers need them on one GPU.")
    if on_overflow not in ("raise", "report"):
        raise ArgumentError(f'on_overflow must be "raise" or "report", but is {on_overflow!r}.')
    ground = Ground(devices.pop(), virtual=virtual)
    ground.raises_overflow = on_overflow == "raise"
    ground.quantized = quantized
    return LayerGraphs(named, ground, session, warmup, on_mismatch, delay_commits, on_hooks)


class LayerGraphs:
    """Layers with graphs; see `capture_layers`.

    Attributes:
        scopes: the layers, by name: their states, replays, and why they ran otherwise.
    """

    def __init__(
        self,
        layers: Mapping[str, torch.nn.Module],
        ground: Ground,
        session: OffloadSession | None,
        warmup: int,
        on_mismatch: str,
        delay_commits: bool,
        on_hooks: str,
    ) -> None:
        self._ground = ground
        self._session = session
        self.scopes: dict[str, LayerScope] = {}
        if session is not None:
            session.add_home(ground.space)
            if delay_commits:
                session.delay_commits(on=True)
                ground.launched = session.commit_delayed
        for name, module in layers.items():
            self.scopes[name] = LayerScope(name, module, ground, warmup, on_mismatch, on_hooks)
        self._finalizer = weakref.finalize(self, _close, list(self.scopes.values()), ground)  # also when Python ends
        self._closed = False

    @property
    def captured(self) -> bool:
        """Whether all layers are graphs."""
        return all(scope.state is CaptureState.CAPTURED for scope in self.scopes.values())

    @property
    def resident(self) -> str | None:
        """Why memory of the graphs never goes back; ``None`` if it does."""
        return self._ground.resident

    @property
    def used_bytes(self) -> int:
        """Bytes of GPU memory that lie under something in use now: saved tensors, outputs, gradients, scratch memory."""
        return self._ground.bank.used

    @property
    def held_bytes(self) -> int:
        """Bytes of GPU memory that the graphs hold, in use or not."""
        return self._ground.bank.held

    @property
    def overflows(self) -> dict[str, int]:
        """By how many rows split sizes in the graphs asked for too much at the most, by layer and call, as far as known."""
        return {place: excess for scope in self.scopes.values() for place, excess in scope.overflows.items()}

    def check_rows(self) -> None:
        """Wait for the device, and see whether the replays so far had the rows that their split sizes asked for.

        Raises:
            RowOverflowError: they had not.
        """
        self._ground.synchronize()
        for scope in self.scopes.values():
            scope.look_at_rows()

    def settle(self) -> None:
        """Count as unused what was let go of so far, and give back what closed graphs have left."""
        self._ground.order()
        self._ground.give_up(())

    def report(self) -> str:
        """What became of each layer and what its graphs have addresses for, and what memory all of them hold."""
        lines = []
        for name, scope in self.scopes.items():
            line = f"{name}: {scope.state.value}, {scope.replays} replays"
            if scope.reason is not None:
                line += f"; could not be captured: {type(scope.reason).__name__}: {scope.reason}"
            for why, count in scope.eager.items():
                line += f"; {count} eager: {why}"
            for why in scope.recaptures:
                line += f"; captured anew: {why}"
            for place, excess in scope.overflows.items():
                line += f"; {excess} rows more were asked for than there are, in {place}"
            if scope.ignored:
                line += f"; hooks inside of it run at its capture, and not in replays: of {', '.join(scope.ignored)}"
            if scope.copied:
                line += f"; in {scope.copied} backwards gradients came in with other strides than in the warm-up"
            lines.append(line)
            found = [f"{what} {format_bytes(nbytes)}" for what, nbytes in scope.bytes().items() if nbytes]
            if found:
                lines.append(f"  addresses for {', '.join(found)}")
        bank = self._ground.bank
        lines.append(
            f"memory of the graphs: {format_bytes(bank.held)}, at most {format_bytes(bank.most_held)}; in use now: "
            f"{format_bytes(bank.used)}; put behind addresses {bank.maps} times, of which the host waited for the GPU "
            f"{bank.waits} times"
        )
        delay = self._session.delay if self._session is not None else None
        if delay is not None and delay.commits + delay.forced:
            lines.append(
                f"{delay.commits} commits came after a launch: {1e3 * delay.won:.2f} ms of the host that no launch waited "
                f"for, copies queued {1e3 * delay.late / max(delay.commits, 1):.3f} ms later each; {delay.forced} had no "
                "launch to come after"
            )
        if self._ground.resident is not None:
            lines.append(f"all of it stays: {self._ground.resident}")
        return "\n".join(lines)

    def close(self) -> None:
        """Wait for the GPU, give the layers their forward back, and take the graphs down. Idempotent.

        Gradients that lie in the graphs' memory are moved out of it. Memory under other living tensors stays.
        Where a layer talks to other ranks, close before the process group is destroyed.
        """
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        _close(list(self.scopes.values()), self._ground)
        if self._session is not None:
            self._session.remove_home(self._ground.space)
            self._session.delay_commits(on=False)

    def __enter__(self) -> LayerGraphs:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _close(scopes: list[LayerScope], ground: Ground) -> None:
    ground.synchronize()
    for scope in scopes:
        scope.close()
    ground.close()


def _named(
    layers: torch.nn.Module | Iterable[torch.nn.Module] | Mapping[str, torch.nn.Module],
) -> dict[str, torch.nn.Module]:
    if isinstance(layers, torch.nn.Module) and not isinstance(layers, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        layers = [layers]
    if isinstance(layers, (Mapping, torch.nn.ModuleDict)):
        named = dict(layers.items())
    else:
        named = {f"layer{number}": module for number, module in enumerate(layers)}
    if not named:
        raise ArgumentError("layers is empty: give at least one layer.")
    for name, module in named.items():
        if not isinstance(module, torch.nn.Module):
            raise ArgumentTypeError(f"{name} must be a module, but is {type(module).__name__}.")
        if isinstance(module.__dict__.get("forward"), LayerScope):
            raise ArgumentError(f"{name} has graphs already. Close those first.")
    for name, module in named.items():
        why = session_inside(module)
        if why is not None:
            raise ArgumentError(f"{name}: {why}.")
        parts = {id(part) for part in module.modules()}
        for other, another in named.items():
            if other != name and id(another) in parts:
                raise ArgumentError(f"{other} is {name}, or inside it. Give each layer once.")
    return named
