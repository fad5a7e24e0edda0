"""`OffloadSession`: what a user holds to offload the activations of some layers.

In: layers, and rules in bytes. Out: the same gradients, less memory, a record of each step. Keeps true: outside of
`step()` the layers behave as if there were no session; after a step, or an exception in it, no hook of the session is
left on autograd's stack and no host memory is held; no module-level state, so any number of sessions can live in a
process. Does not: know what an op computes.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from te_offload.errors import ArgumentError, ArgumentTypeError, ConflictError, StateError, UnsupportedError
from te_offload.fused.window import named_slot_owners
from te_offload.offload.attachment import Attachment
from te_offload.offload.mover import Counts, Mover
from te_offload.offload.record import StepRecord
from te_offload.offload.visit import LayerVisit, Rules
from te_offload.ops import te_adapter
from te_offload.slots import Reason
from te_offload.units import parse_bytes

HISTORY = 16  # steps whose records are kept


class OffloadSession:
    """Offloads the saved tensors of some layers to host memory between their forward and their backward.

    Args:
        layers: the layers: a list, a ``ModuleList``, or one module, which is then one layer (a ``te.ops.Sequential``
            too).
        min_bytes: a slot smaller than this stays on the device. Bytes, or text such as ``"1MiB"``.
        host_limit: most offloaded bytes on the host at once; slots that do not fit stay on the device. ``None``: no
            limit. The arena may hold more than is on loan; `StepRecord.host_held` says how much.
        max_in_flight: most bytes on the device that wait only for their copy out. Lower saves more memory, and may make
            the GPU wait for the link.
        enabled: ``False`` records everything and offloads nothing.

    Raises:
        ArgumentError: no layers, a layer given twice, inside another, or attached to a session already.
        ArgumentTypeError: something that is no module.
        UnsupportedReleaseError: the installed Transformer Engine has no row in the adapter's table.

    Example:
        >>> with OffloadSession(model.layers, min_bytes="1MiB") as session:
        ...     for batch in batches:
        ...         with session.step():
        ...             model(batch).backward()
        >>> print(session.report())
    """

    def __init__(
        self,
        layers: torch.nn.Module | Iterable[torch.nn.Module],
        *,
        min_bytes: int | str = "1MiB",
        host_limit: int | str | None = None,
        max_in_flight: int | str = "256MiB",
        enabled: bool = True,
    ) -> None:
        te_adapter.require_supported_release()
        if not isinstance(enabled, bool):
            raise ArgumentTypeError(f"enabled must be True or False, but is {enabled!r} ({type(enabled).__name__}).")
        self._rules = Rules(enabled=enabled, min_bytes=parse_bytes(min_bytes, "min_bytes"))
        self._host_limit = None if host_limit is None else parse_bytes(host_limit, "host_limit")
        self._max_in_flight = parse_bytes(max_in_flight, "max_in_flight")
        modules = _list_layers(layers)
        self._device = _device_of(modules)
        self._mover: Mover | None = None
        self._attachments: list[Attachment] = []
        self._records: collections.deque[StepRecord] = collections.deque(maxlen=HISTORY)
        self._steps = 0
        self._entered = False
        self._in_step = False
        self._closed = False
        self._visits: list[LayerVisit] = []
        self._open: list[tuple[Attachment, LayerVisit]] = []
        self._outer_hooks: Any = None
        try:
            for number, module in enumerate(modules):
                owners = named_slot_owners(module)
                self._attachments.append(Attachment(f"layer{number}", module, owners, weakref.ref(self)))
        except BaseException:
            self.close()
            raise

    # Lifetime --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> OffloadSession:
        """Enter once.

        Raises:
            StateError: entered before, or closed.
        """
        self._check_open()
        if self._entered:
            raise StateError("This OffloadSession was entered before; it can be entered once. Make another one.")
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()

    def close(self) -> None:
        """Detach from the layers and give back all memory. Idempotent."""
        if self._in_step:
            self._end_step()
        for attachment in self._attachments:
            attachment.detach()
        if self._mover is not None:
            self._mover.pool.close()
        self._closed = True

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step: forwards of the layers and their backwards, in any order and number.

        A forward whose backward has not come when the step ends gives its memory back; its backward is an error then.

        Raises:
            StateError: inside another step of this session, or after close.
            ConflictError: inside Transformer Engine's own offloading context.
            UnsupportedError: while a CUDA graph is captured.
        """
        self._begin_step()
        try:
            yield
        finally:
            if self._in_step:  # else close() has ended it
                self._end_step()

    # Results ---------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The records of the last steps, oldest first; at most the last 16."""
        return tuple(self._records)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held now."""
        return self._mover.pool.live_bytes if self._mover is not None else 0

    def report(self) -> str:
        """The last step as a table.

        Raises:
            StateError: no step has ended yet.
        """
        from te_offload.report.table import step_table

        if not self._records:
            raise StateError("No step has ended yet, so there is nothing to report. Run one `with session.step():`.")
        return step_table(self._records[-1])

    # The step --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("This OffloadSession is closed. Make another one.")

    def _begin_step(self) -> None:
        self._check_open()
        if self._in_step:
            raise StateError("This OffloadSession is in a step already. End that one first: steps do not nest.")
        self._check_no_other_engine()
        if self._is_capturing():
            raise UnsupportedError("A step cannot begin while a CUDA graph is captured. Run it eagerly.")
        if self._mover is None:
            self._mover = Mover(self._device, self._host_limit, self._max_in_flight)
        self._mover.counts = Counts()
        self._mover.pool.peak_bytes = self._mover.pool.live_bytes
        self._outer_hooks = _top_hooks()
        for attachment in self._attachments:
            attachment.forwards = 0
        self._in_step = True

    def _end_step(self) -> None:
        """Write the record, and leave nothing behind: no hook, no host memory."""
        assert self._mover is not None
        self._in_step = False
        while self._open:
            self._open.pop()[1].abort()
        abandoned = sum(chunk.lease is not None for visit in self._visits for chunk in visit.chunks)
        for visit in self._visits:
            for chunk in visit.chunks:
                self._mover.release(chunk)
        self._mover.settle()
        self._mover.pool.settle()
        counts = self._mover.counts
        self._records.append(
            StepRecord(
                index=self._steps,
                slots=tuple(row for visit in self._visits for row in visit.rows()),
                residency=tuple(counts.residency),
                bytes_out=counts.bytes_out,
                bytes_back=counts.bytes_back,
                copies_out=counts.copies_out,
                copies_back=counts.copies_back,
                peak_in_flight=counts.peak_in_flight,
                host_peak=self._mover.pool.peak_bytes,
                host_held=self._mover.pool.held_bytes,
                host_allocations=self._mover.pool.allocations,
                exempt_bytes=sum(visit.exempt_bytes for visit in self._visits),
                abandoned=abandoned,
            )
        )
        self._steps += 1
        self._visits = []
        self._outer_hooks = None

    def _check_no_other_engine(self) -> None:
        other = te_adapter.offload_context_active()
        if other is not None:
            raise ConflictError(
                f"{other} is active, and two engines cannot take the same saved tensors. Use either it or the "
                "OffloadSession around these layers."
            )

    # Called by the attachments ---------------------------------------------------------------------------------------

    def begin_forward(self, attachment: Attachment) -> None:
        """The forward of an attached layer begins.

        Raises:
            ConflictError: inside Transformer Engine's own offloading context.
        """
        if not self._in_step:
            return
        self._check_no_other_engine()
        assert self._mover is not None
        visit = LayerVisit(
            attachment.name,
            attachment.module,
            attachment.forwards,
            self._rules,
            self._mover,
            self._fetch,
            self._why_untouched(),
        )
        attachment.forwards += 1
        self._visits.append(visit)
        self._open.append((attachment, visit))
        visit.open()

    def end_forward(self, attachment: Attachment, *, failed: bool) -> None:
        """The forward of an attached layer ended, or raised."""
        if not self._open or self._open[-1][0] is not attachment:
            return  # its beginning was outside of the step, or raised
        visit = self._open.pop()[1]
        if failed:
            visit.abort()
        else:
            visit.commit()

    def visit_of(self, attachment: Attachment) -> LayerVisit | None:
        """The forward of an attached layer that runs now, if any."""
        return self._open[-1][1] if self._open and self._open[-1][0] is attachment else None

    def _why_untouched(self) -> Reason:
        """Why a forward that begins now must be left alone; `Reason.NONE` if it need not.

        A forward inside a backward is a checkpoint's: what it saves is used at once. A hook that is neither ours nor
        older than the step belongs to someone who wants these tensors (a checkpoint, say); ours would hide them.
        """
        if torch._C._current_graph_task_id() != -1:
            return Reason.IN_BACKWARD
        if self._is_capturing():
            return Reason.IN_CAPTURE
        top = _top_hooks()
        ours = [visit.pack for _, visit in self._open]
        if top is not None and top != self._outer_hooks and top[0] not in ours:
            return Reason.FOREIGN_HOOK
        return Reason.NONE

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _fetch(self, visit_ref: weakref.ref[LayerVisit]) -> None:
        """Before the first moved tensor of a visit is read: start all copies back of it, and of the visit before."""
        visit = visit_ref()
        if visit is None or visit.fetched or self._mover is None or visit not in self._visits:
            return
        visit.fetched = True
        position = self._visits.index(visit)
        earlier = next((v for v in reversed(self._visits[:position]) if any(chunk.lease for chunk in v.chunks)), None)
        for each in (visit, earlier):
            for chunk in reversed(each.chunks if each is not None else []):
                if chunk.untaken:
                    self._mover.start_back(chunk)


def _top_hooks() -> Any:
    """The innermost pair of saved-tensor hooks of this thread, or ``None``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _list_layers(layers: torch.nn.Module | Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    if isinstance(layers, torch.nn.Module) and not isinstance(layers, torch.nn.ModuleList):
        layers = [layers]
    modules = list(layers)
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ArgumentTypeError(f"layers must be modules, but one is {module!r} ({type(module).__name__}).")
    if not modules:
        raise ArgumentError("layers is empty: an OffloadSession needs at least one layer.")
    for number, module in enumerate(modules):
        inside = {id(part) for part in module.modules()}
        for other_number, other in enumerate(modules):
            if other_number != number and id(other) in inside:
                what = "the same module as" if other is module else "inside"
                raise ArgumentError(f"layers[{other_number}] is {what} layers[{number}]. Give each layer once.")
    return modules


def _device_of(modules: list[torch.nn.Module]) -> torch.device:
    for module in modules:
        for parameter in module.parameters():
            if parameter.device.type in ("cpu", "cuda"):
                return parameter.device
            raise ArgumentError(
                f"The layers are on {parameter.device}; an OffloadSession needs them on a GPU or the CPU."
            )
    raise ArgumentError("The layers have no parameters, so there is no device to offload from.")
