"""The Python that README and the docs show runs; what needs a GPU is in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.fused import hopper
from tests.support.docs_code import EXPERTS, FFN, HIDDEN, LAYERS, SPLITS, LossOf, Model, batches, code_blocks, run
from tests.support.mlp import make_inputs, seeded

ON_GPU = {"offloading.md 5", *(f"graphs.md {number}" for number in range(1, 5))}  # tests/gpu/test_docs_code_on_gpu.py
STEPS = 2


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_every_block_of_code_is_run_by_a_test() -> None:
    offloading = {f"offloading.md {number}" for number in range(1, 5)}
    assert set(code_blocks()) == ON_GPU | offloading | {"README.md 1"} | {
        f"adopting.md {number}" for number in range(1, 3)
    }


@pytest.mark.parametrize("block", ["README.md 1", "offloading.md 1"])
def test_session_s_loop_offloads_and_has_the_gradients_of_the_model_alone(
    block: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, twin = (LossOf(Model("cpu", torch.float32)) for _ in range(2))
    names = run(code_blocks()[block], "cpu", model=model, batches=batches(STEPS, "cpu", torch.float32))
    for batch in batches(STEPS, "cpu", torch.float32):
        twin(batch).backward()
    assert all(record.bytes_out > 0 for record in names["session"].records)
    assert "layer0/0.fc1_input" in capsys.readouterr().out
    expected = gradients(twin)
    assert expected and all(map(torch.equal, gradients(model), expected))


def test_readme_s_ops_are_a_grouped_mlp_one_slot_of_which_stays() -> None:
    model = LossOf(Model("cpu", torch.float32))
    names = run(code_blocks()["README.md 1"], "cpu", model=model, batches=batches(1, "cpu", torch.float32))
    mlp, (x, split_sizes, scales) = names["mlp"], next(batches(1, "cpu"))
    assert mlp(x, split_sizes, scales, split_sizes).shape == x.shape
    assert [op.no_offload_activation for op in mlp] == [False, True, False]


def test_inputs_of_layers_that_are_computed_again_go_and_nothing_else_does() -> None:
    model, twin = (Model("cpu", torch.float32) for _ in range(2))
    names = run(code_blocks()["offloading.md 2"], "cpu", model=model)
    session = names["session"]
    with session:
        for x, *more in batches(STEPS, "cpu", torch.float32):
            y = x.requires_grad_()
            with session.step():
                for layer in names["layers"]:
                    y = y + layer(y, *more)
                y.sum().backward()
            twin(x, *more).sum().backward()
    for record in session.records:
        rows = sum(SPLITS) * HIDDEN * 4
        assert record.bytes_out == record.bytes_back == (LAYERS - 1) * rows
        assert [row.nbytes for row in record.slots if row.reason is Reason.LEAF] == [rows]  # x itself
        assert {row.fate for row in record.slots if row.op} == {Fate.RECOMPUTED}
    expected = gradients(twin)
    assert expected and all(map(torch.equal, gradients(model), expected))


def test_experts_that_are_traced_are_compiled_whole_and_one_slot_of_them_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, "reference")
    with torch.compiler.set_stance("force_eager"):  # inductor would ask for a compiler
        experts = run(code_blocks()["offloading.md 4"], "cpu")["experts"]
        with OffloadSession([experts]) as session, session.step():
            x, split_sizes, scales = next(batches(1, "cpu"))
            y = experts(x, split_sizes, scales)
            y.sum().backward()
    assert y.shape == x.shape and experts.w1.grad is not None
    fates = {row.name: row.fate for row in session.records[-1].slots}
    assert fates["layer0/grouped_mlp.fc1_input"] is Fate.KEPT
    assert fates["layer0/grouped_mlp.act_input"] is Fate.OFFLOADED


def test_context_in_place_of_transformer_engine_s_offloads_with_the_gradients_of_the_model_alone() -> None:
    names = run(code_blocks()["offloading.md 3"], "cpu")
    model, twin = (Model("cpu", torch.float32, layers=8) for _ in range(2))
    for x, *more in batches(STEPS, "cpu", torch.float32):
        y = x
        for layer in model.layers:
            with names["context"]:
                y = y + layer(y, *more, more[0])
            y = names["sync"](y)
        y.sum().backward()
        twin(x, *more).sum().backward()
    (record,) = names["context"].records  # of the first step, which ended where the second one began
    assert record.bytes_out > 0
    expected = gradients(twin)
    assert len(expected) == 2 * EXPERTS * 8 and all(map(torch.equal, gradients(model), expected))


def experts_apart(
    x: torch.Tensor, gates: torch.Tensor, ups: torch.Tensor, downs: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """What torchtitan's experts compute, one expert after the other; weights as torchtitan has them."""
    found = []
    for expert, (rows, scale) in enumerate(zip(x.split(SPLITS), scales.split(SPLITS), strict=True)):
        hidden = torch.nn.functional.silu(rows @ gates[expert].t()) * (rows @ ups[expert].t())
        found.append(hidden * scale[:, None] @ downs[expert].t())
    return torch.cat(found)


def weights_of_experts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gates' and the others (E, F, H), and those of the second linear (E, H, F)."""
    gates, ups = (seeded((EXPERTS, FFN, HIDDEN), seed) / HIDDEN**0.5 for seed in (1, 2))
    return gates, ups, seeded((EXPERTS, HIDDEN, FFN), 3) / FFN**0.5


SWITCHES = pytest.mark.parametrize("switch", ["0", "reference"], ids=["op by op", "fused"])


@SWITCHES
def test_experts_in_place_of_torchtitan_s_compute_what_those_do(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(hopper.SWITCH, switch)
    names = run(code_blocks()["adopting.md 2"], "cpu")
    gates, ups, downs = weights_of_experts()
    theirs = SimpleNamespace(w1_EFD=gates, w2_EDF=downs, w3_EFD=ups)
    moe = SimpleNamespace(routed_experts=SimpleNamespace(inner_experts=theirs))
    names["take_their_place"](moe, device="cpu", dtype=torch.float32)
    experts = moe.routed_experts.inner_experts
    assert isinstance(experts, names["GroupedExperts"]) and experts.num_experts == EXPERTS
    x, splits, scales = make_inputs(SPLITS, HIDDEN)
    ones = torch.ones_like(scales)
    torch.testing.assert_close(experts(x, splits), experts_apart(x, gates, ups, downs, ones))
    expected = experts_apart(x, gates, ups, downs, scales)
    (of_theirs,) = torch.autograd.grad(expected.sum(), scales)
    found = experts(x, splits.int(), scales)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), scales)[0], of_theirs, rtol=1e-4, atol=1e-4)
