"""Hopper's tiles as they would be if no two warp groups stored apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def all_together(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that are made within have such tiles; needs quack-kernels."""
    from te_offload.fused.kernels import sm90_tiles

    tiles = sm90_tiles._TILES
    assert any(tile.apart for entries in tiles.values() for tile, _ in entries)
    together = {
        key: tuple((tile._replace(apart=False), time) for tile, time in entries) for key, entries in tiles.items()
    }
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sm90_tiles, "_TILES", together)
            sm90_tiles.tile_for.cache_clear()
            yield
    finally:
        sm90_tiles.tile_for.cache_clear()
