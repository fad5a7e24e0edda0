"""The docs' experts inside of Megatron-core's own language model, with its router, dispatcher and losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.fused import hopper
from tests.support import docs_code, megatron_model
from tests.support.megatron_model import AGAIN, LAYERS, TOP, make_config, make_model, names_taken, share_weights, train

pytest.importorskip("megatron.core", reason="megatron-core is not installed here")

MIN_BYTES = 1024


@pytest.fixture(autouse=True)
def rank(tmp_path: Path) -> Iterator[None]:
    with megatron_model.one_rank(tmp_path / "meeting", "cpu"):
        yield


@pytest.fixture(params=["0", "reference"], ids=["op by op", "fused"])
def experts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(hopper.SWITCH, request.param)
    return docs_code.run(docs_code.code_blocks()["adopting.md 1"], "cpu", **names_taken("cpu"))["Experts"]


def test_losses_and_gradients_are_those_of_megatron_cores_experts(experts: Any) -> None:
    exact = {"params_dtype": torch.float32, "bf16": False}
    theirs = make_model("cpu", make_config("cpu", moe_grouped_gemm=False, **exact))
    ours = make_model("cpu", make_config("cpu", **exact), experts)
    share_weights(ours, theirs)
    expected, found = train(theirs), train(ours)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    by_name = dict(zip(dict(theirs.named_parameters()), expected[1], strict=True))
    of_ours = dict(zip(dict(ours.named_parameters()), found[1], strict=True))
    shared = by_name.keys() & of_ours.keys()
    assert any("router" in name for name in shared) and any("linear_qkv" in name for name in shared)
    for name in shared:
        torch.testing.assert_close(of_ours[name], by_name[name], rtol=1e-4, atol=1e-6)
    for name, gradient in by_name.items():
        if ".local_experts." in name:
            before, _, rest = name.partition("local_experts.")
            expert, linear, _ = rest.split(".")
            mine = of_ours[f"{before}mlp.{'0' if linear == 'linear_fc1' else '2'}.weight{expert}"]
            torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-6)


def test_no_bit_changes_where_a_session_offloads_its_layers(experts: Any) -> None:
    model = make_model("cpu", make_config("cpu"), experts)
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
def test_no_bit_changes_where_megatron_core_computes_something_again(experts: Any, what: str) -> None:
    model = make_model("cpu", make_config("cpu", **AGAIN[what]), experts)
    expected = make_model("cpu", make_config("cpu"), experts)
    expected.load_state_dict(model.state_dict())
    losses, gradients = train(expected)
    with OffloadSession(model.decoder.layers, min_bytes=MIN_BYTES) as session:
        for _ in range(3):
            found = train(model, session)
            assert found[0] == losses and all(map(torch.equal, found[1], gradients))
            assert session.records[-1].bytes_out > 0
    discarded = {row.layer for row in session.records[-1].slots if row.reason is Reason.DISCARDED}
    assert len(discarded) == (LAYERS if what == "norms" else 0)


@pytest.mark.parametrize(
    "other",
    [{"add_bias_linear": True}, {"activation_func": torch.nn.functional.gelu}, {"moe_latent_size": 32}],
    ids=str,
)
def test_experts_refuse_what_they_would_not_compute(experts: Any, other: dict[str, Any]) -> None:
    config = make_config("cpu", **other)
    with pytest.raises(AssertionError):
        experts(2, config)


def test_the_docs_loop_trains_the_model_and_offloads(experts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("cpu", params_dtype=torch.float32, bf16=False)
    words = torch.randint(megatron_model.WORDS, (32, megatron_model.SEQUENCE))
    losses = []

    def forward_backward(model: torch.nn.Module) -> None:
        loss = model(words, torch.arange(words.shape[1]).expand_as(words), None, labels=words).mean()
        loss.backward()
        losses.append(loss.item())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()

    taken = names_taken("cpu", config) | {"Experts": experts, "steps": 4, "forward_backward": forward_backward}
    names = docs_code.run(docs_code.code_blocks()["adopting.md 2"], "cpu", **taken)
    assert losses[-1] < losses[0]
    (record,) = names["session"].records[-1:]
    rows = words.numel() * TOP
    assert record.bytes_back == record.bytes_out >= LAYERS * rows * 2 * megatron_model.FFN * 4
    assert "layer0/mlp.experts.mlp.1.act_input" in capsys.readouterr().out
