"""Random layers in sessions: steps, in random order, have the bits of steps without one."""

from __future__ import annotations

import random

import pytest
import torch

from te_offload.offload import engine
from tests.support.late_copies import LateTransfer
from tests.support.random_layers import Twin, random_session

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.mark.parametrize("part", range(4))
def test_random_layers_in_a_session_have_the_bits_of_layers_without_one(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = 0
    for seed in range(10 * part, 10 * part + 10):
        monkeypatch.setattr(engine, "make_transfer", lambda *_, seed=seed: LateTransfer(seed))
        eager, twin = Twin(seed, torch.device("cpu")), Twin(seed, torch.device("cpu"))
        eager.rows = twin.rows = 16
        session = random_session(random.Random(seed), twin.layers)
        if session is None:
            continue
        with session:
            for number in range(4):
                try:
                    eager.step(number)
                except RuntimeError as error:  # a saved tensor that was written to
                    if "modified by an inplace operation" not in str(error):
                        raise
                    break
                with session.step():
                    twin.step(number)
                assert eager.difference(twin) is None, (seed, number)
            moved += sum(record.bytes_out for record in session.records)
    assert moved > 100_000
