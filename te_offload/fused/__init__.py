"""Fused grouped MLPs, and the one matcher of the windows that they take.

In: the ops of a Sequential. Out: fused ops, or `Support` saying why a window stays unfused. Keeps true: importing this
package registers the fusions, once per process; slots keep their names and meaning in every path. Does not: know that
offloading exists, beyond naming slots.
"""

from typing import Any

from te_offload.fused import blackwell, hopper
from te_offload.fused.support import Support
from te_offload.fused.window import Window, find_windows, named_slot_owners

__all__ = ["Support", "Window", "explain", "find_windows", "named_slot_owners"]


def explain(window: Window, recipe: Any = None) -> Support:
    """Whether a fused op takes a window here; if not, why neither does.

    Args:
        window: from `find_windows`. recipe: a Transformer Engine recipe; ``None``: no quantization.
    """
    reasons = []
    for path, support in (("Blackwell", blackwell.explain(window, recipe)), ("Hopper", hopper.explain(window, recipe))):
        if support.ok:
            return support
        reasons.append(f"{path}: {support.reason}")
    return Support(False, "; ".join(reasons))


blackwell.register()
hopper.register()
