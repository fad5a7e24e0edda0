"""Our code where torch.compile watches: a hook of a compiled module is called with TorchDynamo's eye on each frame.

In: a call. Out: its result. Keeps true: no frame in it is traced, of whosever code: with ``fullgraph=True`` one of the
standard library's that cannot be traced is an error. Does not: cost what counts where nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame

# Of a torch that hides it: always as if someone watched, which takes microseconds a call.
_watcher: Callable[[], Any] = getattr(eval_frame, "get_eval_frame_callback", lambda: True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    function(*args, **kwargs)


def untraced(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call a function."""
    if _watcher() is None:
        function(*args, **kwargs)
    else:
        _call(function, args, kwargs)
