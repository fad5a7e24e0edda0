"""Random programs in sessions of random settings, with copies that are late or at once: what a backward gets is what was
saved, nothing is left behind, and the record adds up.
"""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable

import pytest
import torch

from te_offload import OffloadSession, get_cpu_offload_context
from te_offload.errors import BudgetError, SavedTensorModifiedError
from te_offload.offload import cargo, dropin, load
from te_offload.offload import engine as engine_module
from te_offload.offload import session as session_module
from te_offload.offload.decide import Rules
from te_offload.offload.dropin import ManualController
from te_offload.offload.transfer import CpuTransfer
from tests.support.late_copies import LateTransfer
from tests.support.random_programs import ForwardRaisedError, Layer, Program, random_settings

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of checkpoints under no_grad


def _arrange(patch: pytest.MonkeyPatch, draw: random.Random) -> bool:
    """Random copies, sizes of slots that go together, and alignments. Whether new memory is to be filled with NaN."""
    seed = draw.choice([None, draw.randrange(1 << 30)])
    late = draw.random() < 0.8
    patch.setattr(engine_module, "make_transfer", lambda *_: LateTransfer(seed) if late else CpuTransfer())
    if draw.random() < 0.5:
        together = draw.choice([0, 64, 300])
        patch.setattr(session_module, "Rules", functools.partial(Rules, together=together))
    if draw.random() < 0.5:
        for module in (cargo, load):
            patch.setattr(module, "ALIGNMENT", 64)  # what torch gives on a CPU
    return draw.random() < 0.4


def _is_of_writing(error: RuntimeError) -> bool:
    """Whether it says, or autograd of what a backward saved, that a saved tensor was written to."""
    return isinstance(error, SavedTensorModifiedError) or "modified by an inplace operation" in str(error)


def run(seed: int, device: torch.device, draw: random.Random, *, late: bool = False) -> Program:
    """Some steps of a program in a session. ``late``: with backwards that come when their step is over."""
    program = Program(seed, device)
    varies = draw.random() < 0.5
    settings = random_settings(draw)
    if late:  # what left is gone then
        program.late, program.may_write = True, False
        settings["min_bytes"] = draw.choice([300, 1000, 10_000])
    with OffloadSession(program.layers, **settings) as session:
        if draw.random() < 0.2:
            session.delay_commits(on=True)
        program.session = session
        for number in range(draw.choice([1, 2, 3, 4, 5, 11])):
            try:
                with session.step():
                    program.step(number if varies else 0)
            except (ForwardRaisedError, BudgetError):
                pass
            except RuntimeError as error:
                if not program.wrote or not _is_of_writing(error):
                    raise
            program.between_steps()
            program.check_after_step()
            gc.collect()
            assert session.host_bytes == 0 and session._engine is not None
            assert session._engine.mover.in_flight == 0 and not session._engine.mover._leaving
            for record in session.records[-1:]:
                assert record.bytes_out == sum(row.bytes_out for row in record.slots)
                assert min([row.bytes_out for row in record.slots], default=0) >= 0
                session.report()
    program.session = None
    return program


def run_in_the_context(seed: int, device: torch.device, draw: random.Random) -> Program:
    """Some steps of a program in the loop that Transformer Engine's context is used in."""
    program = Program(seed, device)
    program.late, program.knows_parameters = draw.random() < 0.3, False
    program.may_write = program.may_write and not program.late
    manual, layers = draw.random() < 0.4, len(program.layers)
    made = get_cpu_offload_context(True, draw.randint(0, layers), layers, manual_synchronization=manual)
    context, sync = made[0], made[1]

    def call(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        with context:
            y: torch.Tensor = layer(x)
        y = sync(y) if y.requires_grad else y
        for _ in range(draw.randint(0, 3) if manual else 0):
            ours: ManualController = made[2]
            ask = draw.choice(
                [ours.start_offload_layer, ours.release_activation_forward_gpu_memory, ours.start_reload_layer]
            )
            ask(draw.choice(list(context.round)))
        return y

    program.call = call
    for number in range(draw.choice([1, 2, 3, 5])):
        try:
            program.step(number)
        except ForwardRaisedError:
            pass
        except RuntimeError as error:
            if not program.wrote or not _is_of_writing(error):
                raise
        program.check_after_step()
    assert all(record.bytes_out == sum(row.bytes_out for row in record.slots) for record in context.records)
    context.close()
    return program


def _run(seed: int, how: Callable[[int, torch.device, random.Random], Program] = run) -> Program:
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        torch.use_deterministic_algorithms(_arrange(patch, draw))
        patch.setattr(dropin, "MIN_BYTES", draw.choice([0, 0, 64, 1000]))
        try:
            program = how(seed, CPU, draw)
        finally:
            torch.use_deterministic_algorithms(False)
    assert program.unfreed() == 0
    return program


@pytest.mark.parametrize("seed", range(150))
def test_what_backwards_of_a_random_program_get_is_what_was_saved(seed: int) -> None:
    _run(seed)


@pytest.mark.parametrize("seed", range(40))
def test_what_backwards_of_a_random_program_get_in_the_context_is_what_was_saved(seed: int) -> None:
    _run(seed, run_in_the_context)


def test_what_backwards_get_that_come_when_their_step_is_over_is_what_was_saved() -> None:
    programs = [_run(seed, functools.partial(run, late=True)) for seed in range(40)]
    assert sum(program.came_late for program in programs) > 5


def test_random_programs_themselves_are_sound() -> None:
    discarded = 0
    for seed in range(20):
        program = Program(seed, CPU)
        program.may_raise = program.may_write = False
        program.step(0)
        program.check_after_step()
        assert program.unfreed() == 0
        discarded += program.discarded
    assert discarded > 5


@pytest.mark.slow
def test_what_backwards_of_many_random_programs_get_is_what_was_saved() -> None:
    compared = 0
    for seed in range(1000, 2000):
        try:
            compared += _run(seed).compared
        except BaseException as error:
            raise AssertionError(f"random program {seed}") from error
    assert compared > 10_000
