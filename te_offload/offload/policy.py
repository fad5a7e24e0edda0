"""What a user asks for: which policy, and the budgets that a plan has to meet.

In: the arguments of `OffloadSession`. Out: a frozen `Policy` in whole bytes. Keeps true: what cannot be is refused here,
with the argument's name. Does not: choose slots (planner.py does).
"""

from __future__ import annotations

from dataclasses import dataclass

from te_offload.errors import ArgumentError, ArgumentTypeError
from te_offload.units import parse_bytes

POLICIES = ("all", "planned")


@dataclass(frozen=True)
class Policy:
    """What a session offloads, and within which budgets; see `OffloadSession`. Sizes in bytes.

    Attributes:
        keep_more: bytes that stay beside what else would, because of the pipeline stage.
        device_limit: most bytes that torch may have allocated on the device.
    """

    name: str
    budget_per_layer: int | None = None
    fraction: float | None = None
    keep_more: int = 0
    host_limit: int | None = None
    replan_drift: float = 0.25
    device_limit: int | None = None

    @classmethod
    def of(
        cls,
        name: str | None,
        budget_per_layer: int | str | None,
        fraction: float | None,
        pp_rank_delta: int | str,
        pp_rank: int,
        host_limit: int | str | None,
        replan_drift: float,
        device_limit: int | str | None = None,
    ) -> Policy:
        """The policy of some arguments.

        Raises:
            ArgumentError: a name, size or share that cannot be. ArgumentTypeError: a wrong type.
        """
        if name is not None and name not in POLICIES:
            known = ", ".join(repr(policy) for policy in POLICIES)
            raise ArgumentError(f"policy must be one of {known}, but is {name!r}.")
        if fraction is not None and budget_per_layer is not None:
            raise ArgumentError("Give fraction or budget_per_layer, not both: each says how much goes.")
        for title, share, top in (("fraction", fraction, 1.0), ("replan_drift", replan_drift, float("inf"))):
            if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float))):
                raise ArgumentTypeError(f"{title} must be a number, but is {share!r} ({type(share).__name__}).")
            if share is not None and not 0.0 <= share <= top:
                raise ArgumentError(f"{title} must be from 0 to {top:g}, but is {share:g}.")
        if isinstance(pp_rank, bool) or not isinstance(pp_rank, int):
            raise ArgumentTypeError(f"pp_rank must be an int, but is {pp_rank!r} ({type(pp_rank).__name__}).")
        if pp_rank < 0:
            raise ArgumentError(f"pp_rank must not be negative, but is {pp_rank}.")
        keep_more = pp_rank * parse_bytes(pp_rank_delta, "pp_rank_delta")
        budget = None if budget_per_layer is None else parse_bytes(budget_per_layer, "budget_per_layer")
        limit = None if host_limit is None else parse_bytes(host_limit, "host_limit")
        most = None if device_limit is None else parse_bytes(device_limit, "device_limit")
        others = [budget is not None, fraction is not None, keep_more > 0]
        if most is not None and any(others):
            raise ArgumentError(
                "Give device_limit alone, without budget_per_layer, fraction or pp_rank_delta: each says how much goes."
            )
        has_budget = most is not None or any(others)
        if name == "all" and has_budget:
            raise ArgumentError(
                'policy="all" sends every slot that may go; leave it out to let a plan meet the budgets.'
            )
        chosen = name or ("planned" if has_budget else "all")
        return cls(chosen, budget, fraction, keep_more, limit, float(replan_drift), most)
