"""Fused grouped MLPs, and the one matcher of the windows that they take.

In: the ops of a Sequential. Out: fused ops, or `Support` saying why a window stays unfused. Keeps true: importing this
package registers the fusions, once per process; slots keep their names and meaning in every path. Does not: know that
offloading exists, beyond naming slots.
"""

from typing import Any

import transformer_engine.pytorch as te

from te_offload.errors import ArgumentTypeError
from te_offload.fused import blackwell, hopper_choice
from te_offload.fused.calls import Fusion, fusions_in
from te_offload.fused.support import Support
from te_offload.fused.window import Window, find_windows, named_slot_owners
from te_offload.ops import te_adapter

__all__ = ["Fusion", "Support", "Window", "explain", "find_windows", "fuse", "fusions_in", "named_slot_owners"]


def explain(window: Window, recipe: Any = None) -> Support:
    """Whether a fused op takes a window here; if not, why neither does.

    Args:
        window: from `find_windows`. recipe: a Transformer Engine recipe; ``None``: no quantization.
    """
    reason = hopper_choice.reason_unfused(window, recipe)
    return Support(not reason, reason)


def fuse(sequential: te.ops.Sequential, recipe: Any = None) -> list[Support]:
    """Have te_offload's own fused op take the windows of a Sequential of plain `te.ops`, from its next call on. Windows
    with an op of `te_offload.ops` need no such call.

    Args:
        sequential: of Transformer Engine. recipe: that it will run under; ``None``: no quantization.

    Returns:
        for each window whether it is taken, and if not, why.

    Raises:
        ArgumentTypeError: no Sequential of Transformer Engine.
    """
    if not isinstance(sequential, te.ops.Sequential):
        raise ArgumentTypeError(f"fuse takes a te.ops.Sequential, but got {type(sequential).__name__}.")
    found = list(find_windows(list(sequential)))
    for window in found:
        window.ask_for()
    te_adapter.forget_fusions(sequential)
    return [hopper_choice.explain(window, recipe) for window in found]


blackwell.register()
hopper_choice.register()
