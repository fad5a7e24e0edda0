"""Autograd in the calling thread on a GPU (`torch.autograd.set_multithreading_enabled(False)`): the bits are the same."""

from __future__ import annotations

import contextlib

import pytest
import torch

from te_offload import OffloadSession
from te_offload.graphs import capture_layers
from tests.gpu.test_layer_graphs_on_gpu import fused as fused
from tests.support.layer_stack import Model, batches, captured, grads, train, weights
from tests.support.mlp import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*experts lie up to"),  # small ones, where the driver happens to put them
]


def trained(*, threads: bool, offloads: bool, graphs: bool) -> dict[str, torch.Tensor]:
    """Losses, the last gradients and the weights of five steps."""
    model = Model()
    session = OffloadSession(model.layers, min_bytes=0, max_in_flight=0) if offloads else None
    layers = capture_layers(model.layers, session=session, warmup=2) if graphs else None
    with torch.autograd.set_multithreading_enabled(threads), layers or contextlib.nullcontext():
        losses = [train(model, batch, session) for batch in batches(5)]
        found = {"losses": torch.stack(losses), **{f"gradient of {name}": grad for name, grad in grads(model).items()}}
        if layers is not None:
            captured(layers)
    if session is not None:
        assert session.records[-1].bytes_out > 0
        session.close()
    return found | weights(model)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs of layers"])
@pytest.mark.parametrize("offloads", [False, True], ids=["no offload", "offload"])
def test_training_with_autograd_in_the_calling_thread_gives_the_same_bits(offloads: bool, graphs: bool) -> None:
    expected = trained(threads=True, offloads=False, graphs=False)
    assert_same_bits(trained(threads=False, offloads=offloads, graphs=graphs), expected)
