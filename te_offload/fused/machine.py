"""Whether this machine can run the Hopper kernels: the card, its memory, and the packages that they come in.

In: nothing. Out: a reason against it, or none; whether memory is quick. Keeps true: a package that is there but broken is
a reason, not an error in a training step. Does not: know windows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os

import torch

KERNEL_PACKAGES = (
    ("quack-kernels", "quack", "0.6.5"),
    ("nvidia-cutlass-dsl", "cutlass", "4.8.1"),
)  # as in pyproject.toml
_QUICK_FROM = 120 * 10**9  # bytes: H200s have 141 GB, at 4.8 TB/s; H100s 80 to 96, at 2 to 4


def reason_against(switch: str, *, quantizes: bool) -> str | None:
    """Why the kernels cannot run here; ``None`` if they can.

    Args:
        switch: an environment variable; if it is set, packages of other versions than those tested are taken.
        quantizes: whether they run under a recipe.
    """
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0 (Hopper)"
    for package, module, tested in KERNEL_PACKAGES:
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed: pip install 'te-offload[hopper]'"
        found = _installed(package)
        if found not in (None, tested) and switch not in os.environ:
            return f"{package} is {found}, but {tested} was tested; {switch}=1 takes it all the same"
    if quantizes and importlib.util.find_spec("triton") is None:
        return "triton, which has the quantizers, is not installed"
    return None


def has_quick_memory() -> bool:
    """Whether the current device's memory is that of an H200 (HBM3e), for which tiles have been measured apart. Told by its
    size, as a part of such a card (MIG) is not: it then has an H100's tiles.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_properties().total_memory >= _QUICK_FROM


def broken_package(*, quantizes: bool) -> str | None:
    """Which package is there, but cannot be imported, and why; ``None``: none. To be asked last: the first answer takes
    seconds, which a window that is not taken should not cost.
    """
    packages = [(package, module) for package, module, _ in KERNEL_PACKAGES]
    for package, module in packages + ([("triton", "triton")] if quantizes else []):
        error = _import_error(module)
        if error is not None:
            return f"{package} is installed, but cannot be imported: {error}"
    return None


def _installed(package: str) -> str | None:
    """Its version, if it was installed with its metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _import_error(module: str) -> str | None:
    """Why a package cannot be imported: its part for this CUDA is missing, say. Asked once, since it may take seconds."""
    try:
        importlib.import_module(module)
    except Exception as error:  # what a package raises then is its own choice: cutlass a RuntimeError
        return f"{type(error).__name__}: {error}"
    return None
