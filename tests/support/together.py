"""Hopper's tiles as they would be if no two warp groups stored apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from te_offload.fused.kernels.sm90_tile_lists import Tiles


@contextmanager
def all_together(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that are made within have such tiles; needs quack-kernels."""
    from te_offload.fused.kernels import sm90_quick_tiles, sm90_tile_lists, sm90_tiles

    def together(lists: Mapping[Any, Tiles]) -> dict[Any, Tiles]:
        assert any(tile.apart for entries in lists.values() for tile, _ in entries)
        return {key: tuple((tile._replace(apart=False), time) for tile, time in tiles) for key, tiles in lists.items()}

    try:
        with monkeypatch.context() as patch:
            patch.setattr(sm90_tiles, "TILES", together(sm90_tile_lists.TILES))
            patch.setattr(sm90_tiles, "QUICK_MEMORY", together(sm90_quick_tiles.QUICK_MEMORY))
            sm90_tiles.tile_for.cache_clear()
            yield
    finally:
        sm90_tiles.tile_for.cache_clear()
