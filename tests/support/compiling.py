"""Processes in which Hopper's kernels compile, while other tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("bf16", "others", "glu", "fp8", "blocks")  # of `compile_sm90`
_YIELDING = ("nice",) if shutil.which("nice") else ()  # to the tests beside them


class Running:
    """A process for each part, all at once; the first two share kernels.

    Args:
        folder_for: makes one, by name.
    """

    def __init__(self, folder_for: Callable[[str], Path]) -> None:
        folders = {part: folder_for(part) for part in PARTS[1:]}
        self._folders = {"bf16": folders["others"], **folders}
        self._processes = {part: self._start(part, folder) for part, folder in self._folders.items()}

    def _start(self, part: str, folder: Path) -> subprocess.Popen[bytes]:
        with open(folder / f"{part}.out", "wb") as out, open(folder / f"{part}.err", "wb") as err:
            return subprocess.Popen(
                [*_YIELDING, sys.executable, "-m", "tests.support.compile_sm90", part],
                cwd=ROOT,
                env=os.environ | {"QUACK_CACHE_DIR": str(folder)},
                stdout=out,
                stderr=err,
            )

    def printed(self, part: str) -> str:
        """What a part printed. Waits for its end."""
        failed = self._processes[part].wait()
        assert not failed, (self._folders[part] / f"{part}.err").read_text()[-2000:]
        return (self._folders[part] / f"{part}.out").read_text()

    def objects(self, part: str) -> list[Path]:
        """The kernels that are in its folder now."""
        return list(self._folders[part].rglob("*.o"))

    def end(self) -> None:
        """Nothing compiles any more."""
        for process in self._processes.values():
            process.kill()
            process.wait()
