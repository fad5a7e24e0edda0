"""Fused grouped MLPs, and the one matcher of the windows that they take.

In: the ops of a Sequential. Out: fused ops, or `Support` saying why a window stays unfused. Keeps true: importing this
package registers the fusions, once per process; slots keep their names and meaning in every path. Does not: know that
offloading exists, beyond naming slots.
"""

from te_offload.fused import blackwell
from te_offload.fused.blackwell import explain
from te_offload.fused.support import Support
from te_offload.fused.window import Window, find_windows, named_slot_owners

__all__ = ["Support", "Window", "explain", "find_windows", "named_slot_owners"]

blackwell.register()
