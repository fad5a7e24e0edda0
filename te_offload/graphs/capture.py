"""A function as a CUDA graph: warm-up, capture, checked replay, teardown.

In: a function, example inputs, and the modules whose parameters it uses. Out: `Capture`, called like the function. Keeps
true: a graph that was not captured whole is never replayed; after a failure everything is as before it and the function
runs eagerly, with the reason kept; the caller's tensors are never written. Does not: capture what waits for the host.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from te_offload.errors import (
    ArgumentError,
    CaptureError,
    InputMismatchError,
    RowOverflowError,
    StateError,
    WarmUpError,
)
from te_offload.graphs.backend import Backend, CudaBackend, Pool, Recording
from te_offload.graphs.collectives import check_process_groups
from te_offload.graphs.reasons import explained, without_frames
from te_offload.graphs.recorded import Boxed, RecordedGraph
from te_offload.graphs.residents import Residents
from te_offload.graphs.signature import Kind, Signature
from te_offload.graphs.states import CaptureState, change
from te_offload.graphs.weak import Lease, WeakOutput
from te_offload.offload.allocator import check_captures
from te_offload.offload.engine import GROWTH_STEPS
from te_offload.offload.session import OffloadSession
from te_offload.ops import row_check
from te_offload.ops.row_check import RowCheck


def capture(
    function: Callable[..., Any],
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    session: OffloadSession | None = None,
    modules: Iterable[torch.nn.Module] = (),
    stay: Sequence[torch.Tensor] = (),
    generators: Sequence[torch.Generator] = (),
    warmup: int = 3,
    on_mismatch: str = "raise",
    clone_outputs: bool = False,
    on_overflow: str = "raise",
    pool: Pool | None = None,
) -> Capture:
    """Have a function replayed as a CUDA graph from its fourth call on.

    The first ``warmup`` calls run it, on the stream on which the next one captures it; each call does its work once.

    Args:
        function: of tensors on one GPU and of other values; it may hold a whole training step.
        example_inputs, example_kwargs: what it is called with; tensors may have any numbers. Parameters among them, and
            tensors in ``stay``, are read where they lie; other tensors are copied into buffers of the graph's.
        session: of which each run of the function is one step; its copies become nodes of the graph, by the rules of the
            last warm-up run. Its host memory stays as long as the capture, also after its ``close()``.
        modules: whose parameters, buffers and gradients it uses; before each replay they must be where they were.
        stay: tensors among the inputs that stay in place.
        generators: beside the GPU's own, whose random numbers it draws.
        warmup: runs before the capture, one or more.
        on_mismatch: ``"raise"`` an `InputMismatchError` for inputs of another kind, or parameters or gradients that
            moved; or ``"recapture"``: warm up and capture anew.
        clone_outputs: return copies. Otherwise outputs may be read until the next call, and are a `StaleOutputError` then.
        on_overflow: for split sizes on the GPU that ask for more rows than a grouped linear's input has; what does not fit
            is left out, and the first call after it is known (no call waits for the GPU) says so. ``"raise"`` a
            `RowOverflowError`, or ``"report"`` it in `Capture.overflows` alone.
        pool: of memory, to share with captures that are replayed in the order in which they were captured.

    Raises:
        ArgumentError: no warm-up run, or fewer than the session needs, an unknown ``on_mismatch``, inputs on several
            devices.
        CaptureError: nothing among the inputs and modules is on a GPU.
    """
    modules = list(modules)
    device = _device_of((example_inputs, example_kwargs), modules)
    if device is None or device.type != "cuda":
        raise CaptureError(
            f"Nothing to capture: the inputs and modules are on {device or 'no device'}. A CUDA graph needs them on a GPU."
        )
    if session is not None:
        function = in_session(function, session, warmup)
    return Capture(
        function,
        CudaBackend(device, pool),
        (example_inputs, example_kwargs or {}),
        modules=modules,
        stay=stay,
        generators=generators,
        warmup=warmup,
        on_mismatch=on_mismatch,
        clone_outputs=clone_outputs,
        on_overflow=on_overflow,
    )


def in_session(function: Callable[..., Any], session: OffloadSession, warmup: int) -> Callable[..., Any]:
    """A function each run of which is one step of a session.

    Raises:
        ArgumentError: the session takes host memory in more runs than come before the capture.
    """
    if warmup < GROWTH_STEPS:
        raise ArgumentError(
            f"warmup={warmup}, but a session takes host memory in its first {GROWTH_STEPS} steps, which cannot be "
            "captured. Give it as many warm-up runs."
        )

    def step(*args: Any, **kwargs: Any) -> Any:
        with session.step():
            return function(*args, **kwargs)

    return step


class Capture:
    """A function that is, or will be, a graph; see `capture`.

    Args:
        function: what is captured. backend: by whom. examples: positional and keyword arguments.
        raw_outputs: return the graph's own tensors, for another graph to read.
        boxed: captured in the function's place, over inputs of which it may let go.

    Attributes:
        reason: why it runs eagerly, if it does. recaptures: why it was captured anew, each time.
        captures: how often it was captured.
        overflows: by how many rows split sizes in the graph asked for too much at the most, by call, as far as is known.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        examples: tuple[Sequence[Any], Mapping[str, Any]],
        *,
        modules: Sequence[torch.nn.Module] = (),
        stay: Sequence[torch.Tensor] = (),
        generators: Sequence[torch.Generator] = (),
        warmup: int = 3,
        on_mismatch: str = "raise",
        clone_outputs: bool = False,
        on_overflow: str = "raise",
        raw_outputs: bool = False,
        boxed: Boxed | None = None,
    ) -> None:
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
            raise ArgumentError(f"warmup must be 1 or more runs, since kernels are loaded in them, but is {warmup!r}.")
        if on_mismatch not in ("raise", "recapture"):
            raise ArgumentError(f'on_mismatch must be "raise" or "recapture", but is {on_mismatch!r}.')
        if on_overflow not in ("raise", "report"):
            raise ArgumentError(f'on_overflow must be "raise" or "report", but is {on_overflow!r}.')
        self.reason: BaseException | None = None
        self.overflows: dict[str, int] = {}
        self._rows: RowCheck | None = None
        self._raises_overflow = on_overflow == "raise"
        self.recaptures: list[str] = []
        self._function = function
        self._backend = backend
        self._residents = Residents(modules)
        self._stay = tuple(stay)
        self._generators = tuple(generators)
        self._warmup = warmup
        self._raises = on_mismatch == "raise"
        self._clones = clone_outputs
        self._raw = raw_outputs
        self._boxed = boxed
        self._owned: list[Any] = []
        self.captures = 0
        self._state = CaptureState.WARMING_UP
        self._runs = 0
        self._producers: list[Any] = []
        self._lease = Lease()
        self._graph = RecordedGraph(backend)
        self._finalizer = weakref.finalize(self, self._graph.close)  # also when Python ends
        self._take_inputs(*examples)

    # What a caller sees ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> CaptureState:
        """What the next call does."""
        return self._state

    def wait_for(self, producer: Any) -> None:
        """Have the next call wait for the inputs' producer, if that is not the stream on which it is called.

        Args:
            producer: a stream or an event.
        """
        self._producers.append(producer)

    def warm_up(self) -> None:
        """Do the missing warm-up runs now, with the example inputs: for a function that changes nothing but its outputs.

        Raises:
            StateError: closed, or captured already.
        """
        self._expect(CaptureState.WARMING_UP)
        while self._runs < self._warmup:
            self._run()

    def record(self) -> None:
        """Capture now, with the next call's replay to come; `reason` says why if it could not be.

        Raises:
            WarmUpError: warm-up runs are missing.
            StateError: closed, or captured already.
        """
        self._expect(CaptureState.WARMING_UP)
        if self._runs < self._warmup:
            raise WarmUpError(
                f"{self._warmup - self._runs} of {self._warmup} warm-up runs are missing before the capture. Call the "
                "capture so often, or its warm_up()."
            )
        self._record()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function: as a warm-up, as a graph, or eagerly; inside another capture as a part of that one.

        Raises:
            InputMismatchError: inputs of another kind, or parameters or gradients that moved.
            RowOverflowError: split sizes in an earlier replay asked for more rows than there are.
            StateError: closed.
        """
        return self._call_with(args, kwargs)

    def call_boxed(self, inputs: list[Any]) -> Any:
        """A call whose inputs are let go of early, if ``boxed``: the list may be emptied. Raises as a call does."""
        return self._call_with(inputs, {})

    def _call_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._state is CaptureState.CLOSED:
            raise StateError("This capture is closed. Make another one.")
        if self._backend.in_capture():
            return self._function(*args, **kwargs)
        self._look_at_rows()
        producers, self._producers = self._producers, []
        for producer in producers:
            self._backend.wait_for(producer)
        if self._state is CaptureState.EAGER:
            return self._run_eagerly(args, kwargs)
        captured = self._state is CaptureState.CAPTURED
        difference, leaves = self._signature.difference(args, kwargs, placed=captured)
        if difference is None and captured:
            difference = self._residents.moved()
        if difference is not None:
            self._start_over(difference, args, kwargs)
            leaves = pytree.tree_leaves((args, kwargs))
        self._take(leaves)
        if self._state is CaptureState.WARMING_UP and not self.is_warm and isinstance(args, list):
            leaves.clear()
            args.clear()
        try:
            return self._run_or_replay(args, kwargs)
        finally:
            if self._state is CaptureState.CAPTURED or self._raw:
                for number in self._borrowed:  # whoever gave it may ask who else holds it
                    self._inputs[number] = None

    def _run_or_replay(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._state is CaptureState.WARMING_UP:
            if self._runs < self._warmup:
                return self._run()
            self._record()
        if self._state is CaptureState.CAPTURED:
            try:
                return self._replay()
            except RuntimeError as error:
                if self._graph.replays:
                    raise
                self._give_up(error)  # the first replay: nothing was done yet
        return self._run_eagerly(args, kwargs)

    def eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function this once without a graph, with any inputs, on the stream of the captures.

        What it does to gradients may have the next call find that they moved.

        Raises:
            StateError: closed.
        """
        if self._state is CaptureState.CLOSED:
            raise StateError("This capture is closed. Make another one.")
        return self._run_eagerly(args, kwargs)

    def check_rows(self) -> None:
        """Wait for the device, and see whether the replays so far had the rows that their split sizes asked for.

        Raises:
            RowOverflowError: they had not.
        """
        self._backend.settle()
        self._look_at_rows()

    def close(self) -> None:
        """Wait for the device, then give up the graph and its memory. Idempotent.

        Where the function talks to other ranks, close before the process group is destroyed.
        """
        if self._state is CaptureState.CLOSED:
            return
        self._state = change(self._state, CaptureState.CLOSED)
        self._forget("the capture was closed")
        self._finalizer.detach()

    def __enter__(self) -> Capture:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # Steps -----------------------------------------------------------------------------------------------------------

    def _look_at_rows(self) -> None:
        found = self._rows.overflows() if self._rows is not None else {}
        for place, excess in found.items():
            self.overflows[place] = max(excess, self.overflows.get(place, 0))
        if found and self._raises_overflow:
            raise row_check.error(found)

    def _expect(self, state: CaptureState) -> None:
        if self._state is not state:
            raise StateError(f"This capture is {self._state.value}; that can be done while it is {state.value}.")

    def _take_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._signature = Signature.of(args, kwargs, self._stay, self._backend.device)
        if self._raw:  # they are another graph's, and lie elsewhere until that is captured
            self._stay = ()
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        self._inputs: list[Any] = []
        self._buffers: list[torch.Tensor] = []
        self._moving: list[int] = []
        self._staying = [n for n, leaf in enumerate(self._signature.leaves) if leaf.kind is Kind.STAYS]
        self._borrowed = [n for n in self._staying if not isinstance(leaves[n], torch.nn.Parameter)]
        for number, (leaf, found) in enumerate(zip(self._signature.leaves, leaves, strict=True)):
            if leaf.kind is Kind.MOVES:
                buffer = found.detach().clone().requires_grad_(found.requires_grad)
                self._buffers.append(buffer)
                self._moving.append(number)
                found = buffer
            self._inputs.append(found)

    def _take(self, leaves: Sequence[Any]) -> None:
        for number in self._borrowed:  # until the capture they may lie elsewhere each time
            self._inputs[number] = leaves[number]
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, [leaves[number] for number in self._moving])

    def _call(self) -> Any:
        for buffer in self._buffers:
            buffer.grad = None  # as that of a new input
        args, kwargs = pytree.tree_unflatten(self._inputs, self._signature.structure)
        return self._function(*args, **kwargs)

    def _call_to_capture(self) -> Any:
        assert self._rows is not None
        with self._rows.watching():
            if self._boxed is None:
                return self._call()
            owned, self._owned = self._owned, []
            return self._boxed.run(owned or list(self._inputs))

    def _run(self) -> Any:
        call: Callable[[], Any] = self._call
        if self._boxed is not None:
            given = list(self._inputs)
            for number in self._borrowed:
                self._inputs[number] = None
            call = functools.partial(self._boxed.run, given)
            del given
        result = self._backend.warm_up(call)
        self._runs += 1
        return result

    def _run_eagerly(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._boxed is not None:
            return self._backend.warm_up(
                functools.partial(self._boxed.run, args if isinstance(args, list) else list(args))
            )
        return self._backend.warm_up(functools.partial(self._function, *args, **kwargs))

    def _record(self) -> None:
        self._state = change(self._state, CaptureState.CAPTURING)
        recording: Recording | None = None
        try:
            self._residents.look()
            check_process_groups()
            check_captures(self._backend.device)
            self._rows = RowCheck(self._backend.device)
            if self._boxed is not None:
                self._owned = self._boxed.owned(list(self._inputs))
            recording, result = self._backend.record(self._call_to_capture, self._generators)
            outputs, structure = pytree.tree_flatten(result)
            for number, output in enumerate(outputs):
                if isinstance(output, torch.Tensor) and output.device != self._backend.device:
                    raise CaptureError(
                        f"Output {number} of the captured function is on {output.device}, where no replay would change it. "
                        f"Return it on {self._backend.device}."
                    )
        except BaseException as error:
            self._owned = []
            self._residents.restore()
            if recording is not None:
                recording.close()
            self._state = change(self._state, CaptureState.WARMING_UP)
            if not isinstance(error, Exception):
                raise
            self._give_up(error)
            return
        self._graph.hold(recording, outputs, structure)
        self.captures += 1
        self._signature = self._signature.placed(self._inputs)
        self._residents.note()
        self._state = change(self._state, CaptureState.CAPTURED)

    def _replay(self) -> Any:
        self._lease.ended = "a later replay"
        self._residents.refresh()
        outputs = self._graph.replay()
        self._residents.say_added()
        self._lease = lease = Lease()
        if self._raw:
            found = outputs
        elif self._clones:
            found = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in outputs]
        else:
            found = [WeakOutput.of(one, lease) if isinstance(one, torch.Tensor) else one for one in outputs]
        return pytree.tree_unflatten(found, self._graph.structure)

    def _give_up(self, error: Exception) -> None:
        # Variables of its frames hold what the function made in the graph's memory.
        self.reason = without_frames(explained(error))
        self._state = change(self._state, CaptureState.EAGER)
        self._forget("the capture was given up")

    def _start_over(self, difference: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._raises:
            raise InputMismatchError(
                f"A graph was captured for other inputs: {difference}. Give it what it was captured for, or capture with "
                'on_mismatch="recapture".'
            )
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if structure == self._signature.structure:  # what stays is another tensor now, at the same place
            self._stay = tuple([leaves[number] for number in self._staying if isinstance(leaves[number], torch.Tensor)])
        self.recaptures.append(difference)
        if self._state is CaptureState.CAPTURED:
            self._state = change(self._state, CaptureState.WARMING_UP)
        self._forget("it was captured anew")
        self._runs = 0
        self._take_inputs(args, kwargs)

    @property
    def is_warm(self) -> bool:
        """Whether the next call captures."""
        return self._state is CaptureState.WARMING_UP and self._runs >= self._warmup

    def input_addresses(self) -> set[int]:
        """Where storages of a captured graph's inputs begin."""
        return {one.untyped_storage().data_ptr() for one in self._inputs if type(one) is torch.Tensor}

    def input_at(self, number: int) -> Any:
        """An input as a captured graph reads it."""
        return self._inputs[number]

    def replace_outputs(self, change: Callable[[list[Any]], list[Any]]) -> None:
        """Have a captured graph's outputs be other tensors over the same memory. ``change``: makes them from its own."""
        self._graph.replace_outputs(change)

    def _forget(self, why: str) -> None:
        self._lease.ended = why
        self._inputs, self._buffers, self._moving, self._staying, self._borrowed = [], [], [], [], []
        self._graph.close()
        try:
            self._look_at_rows()  # of the last replay
        except RowOverflowError as error:
            warnings.warn(str(error), stacklevel=3)
        self._rows = None


def _device_of(inputs: Any, modules: Sequence[torch.nn.Module]) -> torch.device | None:
    for one in pytree.tree_leaves(inputs):
        if isinstance(one, torch.Tensor):
            return one.device
    for module in modules:
        for parameter in module.parameters():
            return parameter.device
    return None
