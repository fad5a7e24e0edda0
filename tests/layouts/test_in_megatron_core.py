"""Our experts inside of Megatron-core's own language model, with its router, dispatcher and losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.fused import hopper
from tests.support import docs_code, megatron_model
from tests.support.megatron_model import (
    AGAIN,
    LAYERS,
    TOP,
    make_config,
    make_model,
    name_in_ours,
    names_taken,
    share_weights,
    train,
)

pytest.importorskip("megatron.core", reason="megatron-core is not installed here")

MIN_BYTES = 1024


@pytest.fixture(autouse=True)
def rank(tmp_path: Path) -> Iterator[None]:
    with megatron_model.groups(tmp_path / "meeting", "cpu"):
        yield


@pytest.fixture(params=["0", "reference"], ids=["op by op", "fused"], autouse=True)
def switch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hopper.SWITCH, request.param)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bias_linear": True},
        {"activation_func": "squared_relu", "gated_linear_unit": False},
        {"activation_func": "quick_gelu"},
        {"activation_func": "quick_gelu", "activation_func_clamp_value": 1.0, "glu_linear_offset": 1.0},
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_megatron_cores_experts(settings: dict[str, Any]) -> None:
    from megatron.core import activations

    if "activation_func" in settings:
        settings = settings | {"activation_func": getattr(activations, settings["activation_func"])}
    exact = {"params_dtype": torch.float32, "bf16": False, **settings}
    theirs = make_model("cpu", make_config("cpu", moe_grouped_gemm=False, **exact), ours=False)
    for name, parameter in theirs.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(parameter, std=0.3)  # biases too, and large enough for a clamp
    ours = make_model("cpu", make_config("cpu", **exact))
    share_weights(ours, theirs)
    expected, found = train(theirs), train(ours)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    of_ours = dict(zip(dict(ours.named_parameters()), found[1], strict=True))
    by_name = dict(zip(dict(theirs.named_parameters()), expected[1], strict=True))
    assert {name_in_ours(name) for name in by_name} == of_ours.keys()
    for name, gradient in by_name.items():
        torch.testing.assert_close(of_ours[name_in_ours(name)], gradient, rtol=1e-4, atol=1e-5)


def test_no_bit_changes_where_a_session_offloads_its_layers() -> None:
    model = make_model("cpu", make_config("cpu"))
    losses, gradients = train(model)
    with OffloadSession(model.decoder.layers, min_bytes=MIN_BYTES) as session:
        for _ in range(3):
            found = train(model, session)
            assert found[0] == losses and all(map(torch.equal, found[1], gradients))
            (record,) = session.records[-1:]
            assert record.bytes_back == record.bytes_out > 0
    gone = [row for row in record.slots if row.fate is Fate.OFFLOADED]
    assert len({row.layer for row in gone}) == LAYERS


@pytest.mark.parametrize("what", AGAIN)
def test_no_bit_changes_where_megatron_core_computes_something_again(what: str) -> None:
    model = make_model("cpu", make_config("cpu", **AGAIN[what]))
    expected = make_model("cpu", make_config("cpu"))
    expected.load_state_dict(model.state_dict())
    losses, gradients = train(expected)
    with OffloadSession(model.decoder.layers, min_bytes=MIN_BYTES) as session:
        for _ in range(3):
            found = train(model, session)
            assert found[0] == losses and all(map(torch.equal, found[1], gradients))
            assert session.records[-1].bytes_out > 0
    discarded = {row.layer for row in session.records[-1].slots if row.reason is Reason.DISCARDED}
    assert len(discarded) == (LAYERS if what == "norms" else 0)


def test_the_docs_loop_trains_the_model_and_offloads(capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("cpu", params_dtype=torch.float32, bf16=False)
    words = torch.randint(megatron_model.WORDS, (32, megatron_model.SEQUENCE))
    losses = []

    def forward_backward(model: torch.nn.Module) -> None:
        loss = model(words, torch.arange(words.shape[1]).expand_as(words), None, labels=words).mean()
        loss.backward()
        losses.append(loss.item())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()

    taken = names_taken("cpu", config) | {"steps": 4, "forward_backward": forward_backward}
    names = docs_code.run(docs_code.code_blocks()["adopting.md 1"], "cpu", **taken)
    assert losses[-1] < losses[0]
    (record,) = names["session"].records[-1:]
    rows = words.numel() * TOP
    assert record.bytes_back == record.bytes_out >= LAYERS * rows * 2 * megatron_model.FFN * 4
    assert "layer0/mlp.experts.activation.act_input" in capsys.readouterr().out
