"""Random programs on a GPU, whose copies run beside its work: what a backward gets is what was saved."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable

import pytest
import torch

from te_offload.offload import dropin
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from tests.session.test_random_programs import run, run_in_the_context
from tests.support.random_programs import Program

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")]


Run = Callable[[int, torch.device, random.Random], Program]


def _programs(seeds: Iterable[int], how: Run) -> list[Program]:
    done = []
    for seed in seeds:
        draw = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            if draw.random() < 0.5:
                together = draw.choice([0, 64, 4096])
                patch.setattr(session_module, "Rules", functools.partial(Rules, together=together))
            patch.setattr(dropin, "MIN_BYTES", draw.choice([0, 0, 64, 1000]))
            try:
                program = how(seed, torch.device("cuda", torch.cuda.current_device()), draw)
                assert program.unfreed() == 0
            except BaseException as error:
                raise AssertionError(f"random program {seed}") from error
            done.append(program)
    return done


@pytest.mark.parametrize("part", range(4))
def test_what_backwards_of_random_programs_get_is_what_was_saved(part: int) -> None:
    programs = _programs(range(100_000 + 50 * part, 100_050 + 50 * part), run)
    assert sum(program.compared for program in programs) > 1000


@pytest.mark.parametrize("part", range(4))
def test_what_backwards_of_random_programs_get_in_the_context_is_what_was_saved(part: int) -> None:
    programs = _programs(range(200_000 + 50 * part, 200_050 + 50 * part), run_in_the_context)
    assert sum(program.compared for program in programs) > 1000


@pytest.mark.parametrize("part", range(4))
def test_what_backwards_get_that_come_when_their_step_is_over_is_what_was_saved(part: int) -> None:
    programs = _programs(range(300_000 + 50 * part, 300_050 + 50 * part), functools.partial(run, late=True))
    assert sum(program.compared for program in programs) > 1000
    assert sum(program.came_late for program in programs) > 5
