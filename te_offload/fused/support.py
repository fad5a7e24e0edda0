"""A yes or no with its reason.

In: nothing. Out: `Support`. Keeps true: a "no" always says why. Does not: test anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from te_offload.errors import ArgumentError


@dataclass(frozen=True)
class Support:
    """Whether a path takes a window, and if not, why.

    Attributes:
        ok: it does.
        reason: why it does not; empty if it does.

    Raises:
        ArgumentError: a "no" without a reason, or a "yes" with one.
    """

    ok: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if self.ok == bool(self.reason):
            raise ArgumentError(
                f"Support needs a reason exactly when it says no, but got ok={self.ok}, reason={self.reason!r}."
            )
