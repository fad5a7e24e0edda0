"""Random programs on a GPU, whose copies run beside its work: what a backward gets is what was saved."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from tests.session.test_random_programs import quick_collections, run

__all__ = ["quick_collections"]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")]


@pytest.mark.parametrize("part", range(4))
def test_what_backwards_of_random_programs_get_is_what_was_saved(part: int) -> None:
    compared = 0
    for seed in range(100_000 + 50 * part, 100_050 + 50 * part):
        draw = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            if draw.random() < 0.5:
                together = draw.choice([0, 64, 4096])
                patch.setattr(session_module, "Rules", functools.partial(Rules, together=together))
            try:
                program = run(seed, torch.device("cuda", torch.cuda.current_device()), draw)
                assert program.unfreed() == 0
            except BaseException as error:
                raise AssertionError(f"random program {seed}") from error
            compared += program.compared
    assert compared > 1000
