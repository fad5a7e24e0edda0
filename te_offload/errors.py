"""The errors of te_offload, each saying what failed, for which op and slot, with numbers and units, and what to do next.

In: nothing. Out: exception types. Keeps true: every error of this package is an `OffloadError`, and one that a caller
might expect as a built-in kind (a bad argument, a bad value) is that kind too. Does not: word the messages.

    OffloadError
    ├── ArgumentError            (ValueError)    an argument's value is wrong
    │   ├── ArgumentTypeError    (TypeError)     an argument's type is wrong
    │   ├── BudgetError                          budgets that the slots of this model cannot meet
    │   ├── InputMismatchError                   inputs that a captured graph was not captured for
    │   └── PlanError                            a plan of another model, or a file that is none
    ├── UnsupportedError         (RuntimeError)  this machine, release or layout cannot do what was asked
    │   ├── CaptureError                         something that a CUDA graph cannot hold
    │   ├── NotInstalledError    (ImportError)   Transformer Engine, or a part of it, is not there
    │   ├── UnsupportedReleaseError              a Transformer Engine release that no row of the table covers
    │   └── UnknownLayoutError                   saved tensors that do not look as the release's row says
    ├── StateError               (RuntimeError)  a call in the wrong order
    │   ├── ConflictError                        another offloading engine, or another session, is in the way
    │   ├── StaleOutputError                     an output of a captured graph was read after a later replay
    │   ├── WarmUpError                          a capture was asked for before its warm-up runs
    │   ├── BackwardTwiceError                   the saved tensors of te.ops were asked for a second time
    │   └── StepEndedError                       a backward after its step, or the session, had ended
    ├── RowOverflowError         (RuntimeError)  split sizes in a CUDA graph asked for more rows than there are
    ├── SavedTensorModifiedError (RuntimeError)  a saved tensor was written to before its backward
    ├── CorruptionError          (RuntimeError)  verify=True found other bytes than were saved
    └── CopyError                (RuntimeError)  the CUDA runtime refused a copy
"""

from __future__ import annotations


class OffloadError(Exception):
    """Base of every error that te_offload raises on purpose."""


class ArgumentError(OffloadError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type that cannot work."""


class BudgetError(ArgumentError):
    """What may stay on the device is less than what must."""


class InputMismatchError(ArgumentError):
    """A captured graph was called with inputs, or over parameters, that it was not captured for."""


class PlanError(ArgumentError):
    """A plan does not belong to the model, or a file holds none."""


class UnsupportedError(OffloadError, RuntimeError):
    """This machine, release or combination cannot do what was asked."""


class CaptureError(UnsupportedError):
    """A CUDA graph cannot hold what was asked."""


class NotInstalledError(UnsupportedError, ImportError):
    """Transformer Engine's PyTorch package cannot be imported."""


class UnsupportedReleaseError(UnsupportedError):
    """The installed Transformer Engine is not a release whose saved layouts are known."""


class UnknownLayoutError(UnsupportedError):
    """An op of a supported release saved tensors in a layout that is not the known one."""


class StateError(OffloadError, RuntimeError):
    """A call came at a moment when it cannot be answered."""


class ConflictError(StateError):
    """Two engines, or two sessions, would take the same saved tensors."""


class StaleOutputError(StateError):
    """The memory of a captured graph's output belongs to a later replay now."""


class WarmUpError(StateError):
    """A capture needs runs before it, and some are missing."""


class BackwardTwiceError(StateError):
    """A second backward asked for tensors that te.ops gives out once."""

    @classmethod
    def of_te_ops(cls, what: str) -> BackwardTwiceError:
        """That of te.ops. ``what``: a slot or an op."""
        return cls(
            f"{what}: a second backward over one forward. te.ops cannot run it: Transformer Engine frees what it saved. "
            "Run the forward again instead of retain_graph=True; of pipeline schedules take one that does not split the "
            "backward (1F1B, interleaved)."
        )


class StepEndedError(StateError):
    """A backward asked for tensors whose step or session has ended."""


class RowOverflowError(OffloadError, RuntimeError):
    """Split sizes in a CUDA graph asked for more rows than its buffers have."""


class SavedTensorModifiedError(OffloadError, RuntimeError):
    """A tensor was changed in place between the forward that saved it and its backward."""


class CorruptionError(OffloadError, RuntimeError):
    """The bytes of a restored slot are not the ones that were saved."""


class CopyError(OffloadError, RuntimeError):
    """The CUDA runtime refused a copy."""
