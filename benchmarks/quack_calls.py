"""A grouped MLP by QuACK's own calls: all that the fused op's launches do, or the six products alone.

In: tensors of one grouped MLP. Out: a forward and a step of calls into buffers that are there. Keeps true: weights are
packed, and split sizes stay on the GPU. Does not: find an expert's weights by address.

With activations the calls are those that QuACK's users write: ``gemm_act`` and ``gemm_dact`` of `quack.gemm_interface`
have the activation in their epilogues. FC1 writes act_input and the activation's result, which is not multiplied by the
router scales, since ``gemm_act`` has no place for them; FC2's dgrad writes the activation's gradient, FC2's input again,
and the router scales' gradient. Tiles are those that QuACK's tuner finds for each call, or ours. The products alone have no
activation at all, and move less: they are a floor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from quack.gemm import gemm as gemm_in_tiles
from quack.gemm_config import GemmConfig
from quack.gemm_interface import gemm, gemm_act, gemm_dact

from te_offload.fused import machine
from te_offload.fused.kernels import sm90_launch, sm90_tiles

Step = Callable[[], Any]
_PRODUCTS = 6
_SAME = 0.01  # of a result's norm, by which roundings differ


class Tensors(NamedTuple):
    """Of one grouped MLP in bf16, T tokens, E experts.

    Attributes:
        x, dy: (T, H). w1: (E, F, H), gated (E, 2 F, H). w2: (E, H, F).
        act_input, dact_input: (T, F), gated (T, 2 F). fc2_input: (T, F). scales: (T,), float32.
        offsets: (E + 1,), int32, the experts' first rows.
    """

    x: torch.Tensor
    dy: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    act_input: torch.Tensor
    dact_input: torch.Tensor
    fc2_input: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor


class Results(NamedTuple):
    """What calls write to; the names are those of `Tensors`, dw1 and dw2 are the weights' gradients."""

    act_input: torch.Tensor
    fc2_input: torch.Tensor
    y: torch.Tensor
    dact_input: torch.Tensor
    dw2: torch.Tensor
    dx: torch.Tensor
    dw1: torch.Tensor

    @classmethod
    def of(cls, tensors: Tensors) -> Results:
        """New ones."""
        act_input, x = tensors.act_input, tensors.x
        like = act_input, tensors.fc2_input, x, act_input, tensors.w2, x, tensors.w1
        return cls(*map(torch.empty_like, like))


def products_alone(tensors: Tensors, results: Results, *, one_by_one: bool) -> dict[str, Step]:
    """The six products in our tiles.

    Args:
        tensors: which. results: where they go.
        one_by_one: tiles are taken from counts that a memset sets to zero first, else given out from the start.
    """
    x, dy, w1, w2, _, dact_input, fc2_input, _, offsets = tensors
    act_input, spare, y, _, dw2, dx, dw1 = results
    counts = torch.zeros(_PRODUCTS, dtype=torch.int32, device=x.device)
    each = counts.split(1) if one_by_one else [None] * _PRODUCTS
    given = [(x, w1, act_input, "fc1"), (fc2_input, w2, y, "fc2"), (dy, w2.mT, spare, "dact")]
    given += [(dact_input, w1.mT, dx, "dgrad")]
    calls: list[Step] = []
    for (a, b, d, product), count in zip(given, each[:4], strict=True):
        tile = _tile(product, tensors, None, d.shape[1], a.shape[1])
        calls.append(functools.partial(_in_tiles, a, b, d, tile, count, cu_seqlens_m=offsets))
    for (a, b, d), count in zip(((dy, fc2_input, dw2), (dact_input, x, dw1)), each[4:], strict=True):
        tile = _tile("wgrad", tensors, *d.shape[1:])
        calls.append(functools.partial(_in_tiles, a.mT, b.mT, d, tile, count, cu_seqlens_k=offsets))

    def run(calls: list[Step]) -> None:
        if one_by_one:
            counts.zero_()
        for call in calls:
            call()

    return {"forward": lambda: run(calls[:2]), "step": lambda: run(calls)}


def with_activations(
    tensors: Tensors, results: Results, *, gated: bool, own_tiles: bool, one_by_one: bool
) -> dict[str, Step]:
    """QuACK's calls with the activation in their epilogues.

    Args:
        tensors: which. results: where they go. gated: SwiGLU, else squared ReLU.
        own_tiles: those that QuACK's tuner finds, which runs at the first call and takes minutes where its cache does not
            have them; else ours. one_by_one: as in `products_alone`; QuACK makes each call's count anew.

    Raises:
        RuntimeError: by the first step, where FC2's dgrad gives something else than the tensors have. Not with a gated
            activation: QuACK's columns are in another order.
    """
    x, dy, w1, w2, *_, scales, offsets = tensors
    act_input, fc2_input, y, dact_input, dw2, dx, dw1 = results
    activation = "swiglu" if gated else "relu_sq"

    def tiles(product: str, columns: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"dynamic_scheduler": one_by_one, "cu_seqlens_m": offsets}
        return found if own_tiles else found | {"config": _config(_tile(product, tensors, None, columns, depth))}

    def plain(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, product: str, **cuts: Any) -> None:
        """Of a (T, K), b (E, N, K), d (T, N); of a weight gradient a (rows, T), b (T, columns), d (E, rows, columns)."""
        if own_tiles:
            gemm(a, b if "cu_seqlens_k" in cuts else b.mT, d, dynamic_scheduler=one_by_one, **cuts)
            return
        count = torch.zeros(1, dtype=torch.int32, device=d.device) if one_by_one else None
        if "cu_seqlens_k" in cuts:
            _in_tiles(a, b.mT, d, _tile(product, tensors, *d.shape[1:]), count, **cuts)
        else:
            _in_tiles(a, b, d, _tile(product, tensors, None, d.shape[1], a.shape[1]), count, **cuts)

    fc1_tiles = tiles("glu" if gated else "fc1", w1.shape[1], w1.shape[2])
    dact_tiles = tiles("dglu" if gated else "dact", w2.shape[2], w2.shape[1])

    def forward() -> None:
        gemm_act(x, w1.mT, activation=activation, preact_out=act_input, postact_out=fc2_input, **fc1_tiles)
        plain(fc2_input, w2, y, "fc2", cu_seqlens_m=offsets)

    def step() -> Any:
        forward()
        *_, dscales = gemm_dact(
            dy, w2, act_input, activation, dact_input, fc2_input, colvec_scale=scales, colvec_reduce=True, **dact_tiles
        )
        plain(dy.mT, fc2_input, dw2, "wgrad", cu_seqlens_k=offsets)
        plain(dact_input, w1.mT, dx, "dgrad", cu_seqlens_m=offsets)
        plain(dact_input.mT, x, dw1, "wgrad", cu_seqlens_k=offsets)
        if unchecked:
            _compare(unchecked.pop(), (dact_input, fc2_input))
        return dscales

    unchecked = [] if gated else [(tensors.dact_input, tensors.fc2_input)]
    return {"forward": forward, "step": step}


def _compare(expected: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...]) -> None:
    for name, one, other in zip(("activation's gradient", "FC2's input"), expected, found, strict=True):
        error = ((other.float() - one.float()).norm() / one.float().norm()).item()
        if not error < _SAME:
            raise RuntimeError(f"QuACK's call for FC2's dgrad gives {name} off by {error:.2%} of its norm.")


@functools.cache
def _has_quick_memory() -> bool:
    """Asked once: each of QuACK's calls, whose host time is a column, looks up its tile."""
    return machine.has_quick_memory()


def _tile(product: str, tensors: Tensors, rows: int | None, columns: int, depth: int = 0) -> sm90_launch.Tile:
    regime = sm90_tiles.Regime.of(tensors.x.shape[0], tensors.w1.shape[0])
    return sm90_tiles.tile_for(product, regime, rows, columns, depth, quick_memory=_has_quick_memory())


def _config(tile: sm90_launch.Tile) -> GemmConfig:
    return GemmConfig(
        tile_m=tile.rows,
        tile_n=tile.columns,
        tile_k=tile.per_stage,
        pingpong=tile.pingpong,
        is_dynamic_persistent=False,
        cluster_m=tile.cluster_rows,
        cluster_n=tile.cluster_columns,
    )


def _in_tiles(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    tile: sm90_launch.Tile,
    count: torch.Tensor | None,
    **cuts: torch.Tensor,
) -> None:
    gemm_in_tiles(
        a,
        b,
        d,
        None,
        count,
        tile.rows,
        tile.columns,
        tile.cluster_rows,
        tile.cluster_columns,
        tile_K=tile.per_stage,
        pingpong=tile.pingpong,
        is_dynamic_persistent=count is not None,
        **cuts,
    )
