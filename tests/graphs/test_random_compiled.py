"""Random layers through the backend of torch.compile, on a backend of captures that needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.fake_graphs import FakeBackend
from tests.support.random_compiled import run_compiled

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of Dynamo's


@pytest.mark.parametrize("seed", [0, 3, 8, 17, 20, 25])
def test_random_layers_through_the_backend_have_the_bits_of_aot_eager(seed: int) -> None:
    assert run_compiled(seed, torch.device("cpu"), lambda _: FakeBackend()) > 0
