"""`OffloadSession`: what a user holds to offload the activations of some layers.

In: layers, and rules in bytes. Out: the same gradients, less memory, a record of each step. Keeps true: outside of
`step()` the layers behave as if there were no session; after a step, or an exception in it, no hook of the session is
left on autograd's stack and no host memory is on loan; no module-level state, so any number of sessions can live in a
process. Does not: know what an op computes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from te_offload.errors import ArgumentError, ArgumentTypeError, ConflictError, StateError, UnsupportedError, WarmUpError
from te_offload.fused.calls import Fusion, fusions_in
from te_offload.fused.window import named_slot_owners
from te_offload.offload.attachment import Attachment
from te_offload.offload.decide import Rules
from te_offload.offload.device_memory import watermarks_of
from te_offload.offload.engine import GROWTH_STEPS, Delay, Engine, HostSettings
from te_offload.offload.mover import Home
from te_offload.offload.plan import Plan
from te_offload.offload.planner import Planner
from te_offload.offload.policy import Policy
from te_offload.offload.quiet import Quiet, signature_of
from te_offload.offload.record import StepRecord
from te_offload.offload.states import SessionState, change
from te_offload.offload.visit import LayerVisit, Region
from te_offload.ops import te_adapter
from te_offload.slots import Reason
from te_offload.units import parse_bytes


class OffloadSession:
    """Offloads the saved tensors of some layers to host memory between their forward and their backward.

    Args:
        layers: the layers: a list, a ``ModuleList``, or one module, which is then one layer (a ``te.ops.Sequential``
            too).
        policy: ``"all"``: every slot that may go goes. ``"planned"``: after the first steps a plan made from their
            times chooses, and keeps the last slots that could not be back in time. Default: ``"planned"`` where a budget
            below is given, else ``"all"``.
        budget_per_layer: bytes of each forward of a layer that may stay on the device; the plan sends the rest.
        fraction: the share, from 0 to 1, of the bytes of all slots that may go that the plan sends.
        device_limit: most bytes that torch may have allocated on the GPU in a step, whatever for; the plan sends as little
            as keeps within it. In timed steps torch's peak statistics are reset.
        pp_rank_delta, pp_rank: a pipeline stage keeps ``pp_rank * pp_rank_delta`` bytes more on the device.
        plan: a `Plan`, or the path of its file: these slots go, from the first step on.
        replan_drift: a plan is made anew when the bytes of the slots have changed by more than this share.
        same_on_every_rank: a process group whose ranks shall have the same plan. Planning then happens after the same
            steps on each, with one collective there and none elsewhere.
        min_bytes: a slot smaller than this stays on the device. Bytes, or text such as ``"1MiB"``.
        host_limit: most bytes of host memory held; slots that do not fit stay on the device. ``None``: no limit.
        host_reserve: host memory taken when the first step begins. Default: what the first three steps need in which
            something goes; in either case no more is taken after them, and what does not fit stays on the device.
        max_tokens: most tokens (rows of the layers' input) that a step will have. Then the host memory of the first steps
            is taken for so many, and random token counts find room.
        max_in_flight: most bytes on the device that wait only for their copy out, and most that are back before the
            backward reaches their layer; but for one slot. ``None``: 256 MiB, or what was measured to keep the link busy.
        verify: compare every restored slot with what was saved; slow, and costs the slots' host memory once more.
        enabled: ``False`` records everything and offloads nothing.

    Raises:
        ArgumentError: no layers, a layer given twice, inside another, or attached to a session already; a policy,
            size, share or plan that cannot be (`PlanError` for a plan of another model).
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
        policy: str | None = None,
        budget_per_layer: int | str | None = None,
        fraction: float | None = None,
        device_limit: int | str | None = None,
        pp_rank_delta: int | str = 0,
        pp_rank: int = 0,
        plan: Plan | str | Path | None = None,
        replan_drift: float = 0.25,
        same_on_every_rank: Any = None,
        min_bytes: int | str = "1MiB",
        host_limit: int | str | None = None,
        host_reserve: int | str = 0,
        max_tokens: int | None = None,
        max_in_flight: int | str | None = None,
        verify: bool = False,
        enabled: bool = True,
    ) -> None:
        te_adapter.require_supported_release()
        for name, flag in (("enabled", enabled), ("verify", verify)):
            if not isinstance(flag, bool):
                raise ArgumentTypeError(f"{name} must be True or False, but is {flag!r} ({type(flag).__name__}).")
        budgets = budget_per_layer, fraction, pp_rank_delta, pp_rank, host_limit
        chosen = Policy.of(policy, *budgets, replan_drift, device_limit)
        # Of which a report says that it was not met; what a pipeline stage keeps beside it may be in any forward.
        self._budget = chosen.budget_per_layer if enabled and not chosen.keep_more else None
        limit, reserve = chosen.host_limit, parse_bytes(host_reserve, "host_reserve")
        if limit is not None and reserve > limit:
            raise ArgumentError(f"host_reserve is {reserve} bytes, more than host_limit allows ({limit}).")
        self._rules = Rules(enabled=enabled, min_bytes=parse_bytes(min_bytes, "min_bytes"))
        self._host = HostSettings(limit, reserve)
        self._max_in_flight = None if max_in_flight is None else parse_bytes(max_in_flight, "max_in_flight")
        self._verify = verify
        if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int)):
            raise ArgumentTypeError(f"max_tokens must be an int, but is {max_tokens!r} ({type(max_tokens).__name__}).")
        if max_tokens is not None and max_tokens < 1:
            raise ArgumentError(f"max_tokens must be positive, but is {max_tokens}.")
        self._max_tokens = max_tokens
        self._tokens = 0  # of this step: the most that a forward had
        modules = _list_layers(layers)
        self._device = _device_of(modules)
        self._device_limit = chosen.device_limit if enabled else None
        self._watermarks = None if self._device_limit is None else watermarks_of(self._device)
        self._engine: Engine | None = None
        self._attachments: list[Attachment] = []
        self._state = SessionState.IDLE
        self._entered = False
        self._captures = False  # whether this step is part of a CUDA graph
        self._quiet = Quiet()
        self._open: list[tuple[Attachment, LayerVisit]] = []
        self._homes: list[Home] = []
        self._delays = False
        self._outer_hooks: Any = None
        try:
            for number, module in enumerate(modules):
                owners = named_slot_owners(module)
                self._attachments.append(Attachment(f"layer{number}", module, owners, weakref.ref(self)))
            given = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
            if given is not None:
                given.check_layers({each.name: each.slot_names for each in self._attachments})
            self._planner = Planner(chosen, given, same_on_every_rank)
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
        if self._state is SessionState.IN_STEP:
            self._end_step()
        for attachment in self._attachments:
            attachment.detach()
        if self._engine is not None:
            self._engine.close()
        if self._state is not SessionState.CLOSED:
            self._state = change("This OffloadSession", self._state, SessionState.CLOSED)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step: forwards of the layers and their backwards, in any order and number.

        A forward whose backward has not come when the step ends gives its memory back; its backward is an error then.

        Raises:
            StateError: inside another step of this session, or after close.
            ConflictError: inside Transformer Engine's own offloading context.
            BudgetError: the budgets cannot be met with what the first steps saved.
            PlanError: the given plan does not fit what the first step saved.
            WarmUpError: while a CUDA graph is captured, but in one of the first three steps that take host memory.
            UnsupportedError: while a CUDA graph is captured, with ``verify=True``.
        """
        self._begin_step()
        raised = True
        try:
            yield
            raised = False
        finally:
            if self._state is SessionState.IN_STEP:  # else close() has ended it
                self._end_step(raised=raised)

    def region(self, name: str, *, no_offload_activation: bool = False) -> contextlib.AbstractContextManager[None]:
        """Name what a layer saves inside, where no op of te_offload names it: attention, norms, projections.

        It is one slot, ``layer/name.region``, of the plan and the record. Outside of an attached layer's forward in a step
        this does nothing, so that a model may carry it always.

        Args:
            name: of the region, unique in its layer; entered again, it is the same slot.
            no_offload_activation: keep it on the device.

        Raises:
            ArgumentError: no name, or one with ``/``, ``.`` or ``[``, which separate the parts of a slot's name.
        """
        if not isinstance(name, str) or not name or not set(name).isdisjoint("/.["):
            raise ArgumentError(f"A region needs a name without '/', '.' and '[', but got {name!r}.")
        return Region(self._open[-1][1] if self._open else None, name, no_offload_activation)

    # Results ---------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The records of the last steps, oldest first; at most the last 4. Waits for the device to pass their end.

        Times are taken in the first eight steps, in four after a new plan, and in one in sixteen of the others; other
        records have none. Nor do they have rows of forwards from which nothing went the last time, unless their input has
        another shape now, or their ops other arguments; a step in which there were no others has no record.
        """
        return self._engine.records() if self._engine is not None else ()

    @property
    def timed_record(self) -> StepRecord | None:
        """The record of the last step whose times were taken and which the device has passed."""
        return self._engine.latest_timed_record() if self._engine is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan that chooses what goes, once there is one."""
        return self._planner.plan

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory on loan now."""
        return self._engine.pool.live_bytes if self._engine is not None else 0

    @property
    def fusions(self) -> tuple[tuple[str, Fusion], ...]:
        """The grouped MLPs of each layer, by its name, and how they ran: fused, or not and why."""
        return tuple((each.name, fusion) for each in self._attachments for fusion in fusions_in(each.module))

    def report(self) -> str:
        """The last step whose times were taken, as a table; the forwards that kept more than ``budget_per_layer``; what
        torch had allocated under a ``device_limit``; and the grouped MLPs that did not run fused.

        Raises:
            StateError: no step has ended yet.
        """
        from te_offload.report.table import budget_lines, device_lines, fusion_lines, step_table

        records = self.records
        if not records:
            raise StateError("No step has ended yet, so there is nothing to report. Run one `with session.step():`.")
        record = self.timed_record or records[-1]
        return step_table(record) + (
            budget_lines(record, self._budget) + device_lines(record, self._device_limit) + fusion_lines(self.fusions)
        )

    # Called by graphs of layers --------------------------------------------------------------------------------------

    def add_home(self, home: Home) -> None:
        """Tensors at a home's addresses come back to the same addresses.

        Raises:
            UnsupportedError: the session has a ``device_limit``: torch does not count the memory of layers' graphs.
        """
        if self._device_limit is not None:
            raise UnsupportedError(
                "device_limit is of what torch's allocator counts, which the memory of layers' graphs is not. Give "
                "budget_per_layer or fraction instead, or capture the whole step."
            )
        self._homes.append(home)
        if self._engine is not None:
            self._engine.mover.homes = self._homes

    def delay_commits(self, *, on: bool) -> None:
        """From now on a forward's copies out are queued by `commit_delayed`, or where they can wait no longer: when another
        layer's forward ends, the backward begins or the step ends.
        """
        self._delays = on
        if self._engine is not None:
            self._engine.delays = on

    def commit_delayed(self) -> None:
        """Queue the copies out of the forward that ended last, which something else has just gone before."""
        if self._engine is not None:
            self._engine.commit_delayed(asked=True)

    @property
    def delay(self) -> Delay | None:
        """What delaying has won and lost so far."""
        return self._engine.delay if self._engine is not None else None

    def remove_home(self, home: Home) -> None:
        """The opposite of `add_home`; nothing of the home may be on the host."""
        self._homes.remove(home)

    # The step --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._state is SessionState.CLOSED:
            raise StateError("This OffloadSession is closed. Make another one.")

    def _begin_step(self) -> None:
        self._check_open()
        if self._state is SessionState.IN_STEP:
            raise StateError("This OffloadSession is in a step already. End that one first: steps do not nest.")
        self._check_no_other_engine()
        self._captures = self._is_capturing()
        if self._captures:
            self._check_capture()
        if self._engine is None:
            self._engine = Engine(self._device, self._rules, self._host, self._max_in_flight, verify=self._verify)
            self._engine.mover.homes = self._homes
            self._engine.delays = self._delays
            self._engine.watermarks = self._watermarks
        if self._rules.enabled and not self._captures:  # a graph has the rules of the step before it
            self._engine.rules = self._planner.rules_for_next_step(self._rules, self._engine)
        self._engine.begin_step(captured=self._captures)
        self._quiet.begin_step(self._engine.rules, timed=self._engine.mover.transfer.timed)
        self._outer_hooks = _top_hooks()
        for attachment in self._attachments:
            attachment.forwards = 0
        self._state = change("This OffloadSession", self._state, SessionState.IN_STEP)

    def _end_step(self, *, raised: bool = False) -> None:
        """Leave nothing behind: no hook, no host memory."""
        assert self._engine is not None
        self._state = change("This OffloadSession", self._state, SessionState.IDLE)
        while self._open:
            self._pop().abort()
        self._quiet.end_step(self._engine.visits)
        growth = self._max_tokens / self._tokens if self._max_tokens is not None and self._tokens else 1.0
        self._engine.end_step(unseen=self._quiet.unseen, growth=growth, raised=raised)
        self._tokens = 0
        self._outer_hooks = None

    def _check_capture(self) -> None:
        if self._verify:
            raise UnsupportedError("verify=True compares on the host, which a CUDA graph cannot. Capture without it.")
        if self._engine is None or not self._engine.may_be_captured:
            done = 0 if self._engine is None else self._engine.warm_steps
            raise WarmUpError(
                f"A session takes host memory in its first {GROWTH_STEPS} steps that offload, which cannot be captured; "
                f"{done} were run. Run the others eagerly, on the stream of the capture."
            )

    def _check_no_other_engine(self) -> None:
        other = te_adapter.offload_context_active()
        if other is not None:
            raise ConflictError(
                f"{other} is active, and two engines cannot take the same saved tensors. Use either it or the "
                "OffloadSession around these layers."
            )

    # Called by the attachments ---------------------------------------------------------------------------------------

    def begin_forward(self, attachment: Attachment, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The forward of an attached layer begins, with some arguments.

        Raises:
            ConflictError: inside Transformer Engine's own offloading context.
        """
        if self._state is not SessionState.IN_STEP:
            return
        assert self._engine is not None
        forward, attachment.forwards = attachment.forwards, attachment.forwards + 1
        if self._max_tokens is not None:
            self._tokens = max(self._tokens, _rows((*args, *kwargs.values())))
        key = attachment.name, forward
        if not self._quiet.looks_at(key, signature_of(args, kwargs, attachment.flags())):
            attachment.unseen = key
            return
        self._check_no_other_engine()
        visit = self._engine.open_visit(attachment.name, attachment.module, forward, self._why_untouched())
        if self._open:
            self._open[-1][0].visit = None
        self._open.append((attachment, visit))
        attachment.visit = visit
        visit.open()

    def end_forward(self, attachment: Attachment, output: Any, *, failed: bool) -> None:
        """The forward of an attached layer ended, or raised. One in a backward is a checkpoint's, which torch ends by an
        exception as soon as it has all; if that is an error, the backward raises it.
        """
        checkpointed = torch._C._current_graph_task_id() != -1
        if attachment.unseen is not None:
            key, attachment.unseen = attachment.unseen, None
            if not failed and self._engine is not None and any(visit.cargos for visit in self._engine.visits):
                _before_backward(output, functools.partial(_approach, weakref.ref(self), key))
                if not checkpointed:  # else what left before may be read any moment
                    self._engine.mover.settle(key)
            return
        if not self._open or self._open[-1][0] is not attachment:
            return  # its beginning was outside of the step, or raised
        visit = self._pop()
        if failed and not checkpointed:
            visit.abort()
        else:
            assert self._engine is not None
            self._engine.end_visit(visit)

    def _pop(self) -> LayerVisit:
        attachment, visit = self._open.pop()
        attachment.visit = None
        if self._open:
            outer, outer_visit = self._open[-1]
            outer.visit = outer_visit
        return visit

    def _why_untouched(self) -> Reason:
        """Why a forward that begins now must be left alone; `Reason.NONE` if it need not.

        A forward inside a backward is a checkpoint's: what it saves is used at once. A hook that is neither ours nor
        older than the step belongs to someone who wants these tensors (a checkpoint, say); ours would hide them.
        """
        if torch._C._current_graph_task_id() != -1:
            return Reason.IN_BACKWARD
        if self._is_capturing() and not self._captures:
            return Reason.IN_CAPTURE
        top = _top_hooks()
        ours = [visit.pack for _, visit in self._open]
        if top is not None and top != self._outer_hooks and top[0] not in ours:
            return Reason.CHECKPOINT if te_adapter.checkpoint_hook_active() else Reason.FOREIGN_HOOK
        return Reason.NONE

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _before_backward(output: Any, call: Any) -> None:
    """Have the backward of what computed ``output`` call first."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    node = first.grad_fn if isinstance(first, torch.Tensor) else None
    if node is not None:
        node.register_prehook(call)


def _approach(session_ref: weakref.ref[OffloadSession], key: tuple[str, int], grads: Any) -> None:
    session = session_ref()
    if session is not None and session._engine is not None and session._state is SessionState.IN_STEP:
        session._engine.returns.approach(key)


def _rows(arguments: Sequence[Any]) -> int:
    """Rows of a layer's input, its first argument of more than one dimension: all but the last one."""
    inputs = (value for value in arguments if isinstance(value, torch.Tensor) and value.ndim > 1)
    return next((math.prod(value.shape[:-1]) for value in inputs), 0)


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
