"""Random trainings with grouped MLPs in sessions, where some compute FC1 again: the bits are those of none without a
session, and records say what happened.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_offload import Fate, SlotName
from te_offload.fused import hopper
from te_offload.offload import engine
from te_offload.ops.te_adapter import pipeline
from tests.support.late_copies import LateTransfer
from tests.support.mlp import assert_same_bits
from tests.support.random_training import Results, Training, random_session

pytestmark = [
    pytest.mark.usefixtures("fp8_in_torch_arithmetic"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:.*keep_quantized_weight=False, but"),  # said once, of calls that go op by op
    pytest.mark.filterwarnings("ignore:.*recompute_act_input=True, but"),
]
# Some calls go op by op: with biases, ``main_grad``, and quantized weights that stay.
OP_BY_OP = (770044, 770057, 770095, 780006, 780024, 780123)


def without_a_session(seed: int) -> tuple[list[Results], list[bool]]:
    """By Transformer Engine's autograd function."""
    FP8GlobalStateManager.reset()
    training = Training(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_only_op", lambda *_: None)
        return training.run(), training.raised


@pytest.mark.parametrize(
    "seeds", [range(8), range(8, 16), (*OP_BY_OP, *range(16, 21))], ids=["0 to 7", "8 to 15", "some calls op by op"]
)
def test_random_training_in_a_session_has_the_bits_of_one_without(
    seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = again = 0
    for seed in seeds:
        monkeypatch.setattr(engine, "make_transfer", lambda *_, seed=seed: LateTransfer(seed))
        expected, raised = without_a_session(seed)
        FP8GlobalStateManager.reset()
        training, others = Training(seed), random.Random(-seed)
        for activation in training.activations:
            activation.recompute_act_input = others.random() < 0.4
        with random_session(random.Random(seed), training.layers) as session:
            found = training.run(session)
            records = session.records
            assert session.host_bytes == 0
        for one, other in zip(expected, found, strict=True):
            assert_same_bits(one, other)
        assert [record.raised for record in records] == [raised[record.index] for record in records]
        moved += sum(record.bytes_back for record in records)
        rows = [row for record in records for row in record.slots]
        again += sum(row.slot is SlotName.ACT_INPUT and row.fate is Fate.RECOMPUTED for row in rows)
    assert moved > 100_000 and again


@pytest.mark.parametrize("seeds", [(10, 22, 27, 47), range(30, 36)], ids=["checkpoints, other scales", "30 to 35"])
def test_random_training_that_runs_fused_is_near_one_that_runs_op_by_op(
    seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the norm of each tensor, so that a scale of another tensor or of another forward shows."""
    for seed in seeds:
        found = []
        for switch in ("0", "reference"):
            monkeypatch.setenv(hopper.SWITCH, switch)
            FP8GlobalStateManager.reset()
            found.append(Training(seed).run())
        for number, (expected, step) in enumerate(zip(*found, strict=True)):
            assert expected.keys() == step.keys()
            for name, tensor in step.items():
                most = 0.35 * expected[name].float().norm() + 1e-6
                off = (tensor.float() - expected[name].float()).norm()
                assert off <= most, f"training {seed}, step {number}, {name}: off by {off}, not within {most}"
