"""Our experts inside of Megatron-core's own language model on a GPU: beside its experts, in its formats, with its
schedule, its checkpoints and its own offloading of other modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_offload import Fate, OffloadSession
from te_offload.fused import fusions_in, hopper
from tests.support import docs_code, megatron_model
from tests.support.device_peaks import peak_of_steps
from tests.support.megatron_model import (
    AGAIN,
    EXPERTS,
    LAYERS,
    make_config,
    make_model,
    names_taken,
    share_weights,
    train,
)

pytest.importorskip("megatron.core", reason="megatron-core is not installed here")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
    pytest.mark.filterwarnings("ignore"),  # Megatron-core's and Transformer Engine's about each other
]

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "scale a tensor": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed scaling": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "blocks": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


@pytest.fixture(autouse=True)
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(hopper.SWITCH, "1")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with megatron_model.groups(tmp_path / "meeting", "cuda"):
        yield


def test_weights_at_the_start_are_those_of_megatron_cores_experts() -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parameters = []
    for ours in (False, True):
        model_parallel_cuda_manual_seed(7)
        parameters.append(dict(make_model("cuda", make_config("cuda"), ours=ours).named_parameters()))
    assert parameters[0].keys() == parameters[1].keys()
    for name, weight in parameters[0].items():
        assert torch.equal(weight, parameters[1][name]), name


def test_losses_and_gradients_are_close_to_those_of_megatron_cores_experts() -> None:
    all_of_them = {"moe_router_topk": EXPERTS}  # else rounding has tokens go to other experts
    theirs, ours = (make_model("cuda", make_config("cuda", **all_of_them), ours=each) for each in (False, True))
    share_weights(ours, theirs)
    expected, found = train(theirs), train(ours)
    assert all(fusion.fused for _, fusion in fusions_of(ours))
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    of_theirs = dict(zip(dict(theirs.named_parameters()), expected[1], strict=True))
    for name, gradient in zip(dict(ours.named_parameters()), found[1], strict=True):
        other = of_theirs[name].float()
        error = (gradient.float() - other).norm() / other.norm()
        assert error < 0.03, (name, error)


def fusions_of(model: Any) -> list[tuple[str, Any]]:
    found = [(name, fusion) for name, module in model.named_modules() for fusion in fusions_in(module)]
    assert found
    return found


def _bits_in_a_session(**settings: Any) -> Any:
    """The last step's record, of steps whose losses and gradients are those without offloading."""
    model = make_model("cuda", make_config("cuda", **settings))
    twin = make_model("cuda", make_config("cuda", **settings))
    twin.load_state_dict(model.state_dict(), strict=False)
    with OffloadSession(model.decoder.layers, min_bytes=1024) as session:
        for _ in range(3):
            losses, gradients = train(twin)
            found = train(model, session)
            assert found[0] == losses and all(map(torch.equal, found[1], gradients))
            (record,) = session.records[-1:]
            assert record.bytes_out > 0
    return record


@pytest.mark.parametrize("kind", FORMATS)
def test_no_bit_changes_where_a_session_offloads_its_layers(kind: str) -> None:
    record = _bits_in_a_session(**FORMATS[kind])
    assert {row.layer for row in record.slots if row.fate is Fate.OFFLOADED} >= {f"layer{n}" for n in range(LAYERS - 1)}


@pytest.mark.parametrize("what", AGAIN)
def test_no_bit_changes_where_megatron_core_computes_something_again(what: str) -> None:
    _bits_in_a_session(**AGAIN[what])


def test_no_bit_changes_where_megatron_core_offloads_other_modules() -> None:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Manager,
    )

    theirs = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "attn_proj"],
        "min_offloaded_tensor_size": 1024,
    }
    model = make_model("cuda", make_config("cuda", **theirs))
    without = make_model("cuda", make_config("cuda"))
    without.load_state_dict(model.state_dict(), strict=False)
    losses, gradients = train(without)
    with OffloadSession(model.decoder.layers, min_bytes=1024) as session:
        for _ in range(3):
            found = train(model, session, around=Manager)
            assert found[0] == losses and all(map(torch.equal, found[1], gradients))
            assert session.records[-1].bytes_out > 0


@pytest.mark.parametrize("kind", ["bf16", "scale a tensor"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_no_step_takes_more_than_a_limit_of_the_device_and_no_bit_changes(share: float, kind: str) -> None:
    sizes = {"num_layers": 6, "hidden_size": 512, "moe_ffn_hidden_size": 512, "num_moe_experts": 8}
    model = make_model("cuda", make_config("cuda", **sizes, **FORMATS[kind]))
    words = torch.randint(megatron_model.WORDS, (2, 4, 1024), generator=torch.Generator().manual_seed(3)).cuda()
    positions = torch.arange(words.shape[-1], device="cuda").expand_as(words[0])

    def step(number: int) -> None:
        model.zero_grad(set_to_none=False)
        for batch in words:
            model(batch, positions, None, labels=batch).mean().backward()

    def gradients() -> list[torch.Tensor]:
        return [each.grad.cpu() for each in model.parameters() if each.grad is not None]

    layers = model.decoder.layers
    most, none_out, _ = peak_of_steps(layers, step, enabled=False)
    expected = gradients()
    least, all_out, _ = peak_of_steps(layers, step)
    assert none_out == 0 < all_out and least < most
    limit = int(most - share * (most - least))
    peak, out, session = peak_of_steps(layers, step, device_limit=limit)
    assert session.plan is not None and session.plan.forecast is not None
    print(
        f"\n{kind} {share}: most {most} least {least} limit {limit} peak {peak} out {out}/{all_out} {session.plan.forecast}"
    )
    assert peak <= limit and 0 < out < all_out
    assert all(map(torch.equal, expected, gradients()))


def test_the_docs_loop_trains_with_megatron_cores_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config, losses = make_config("cuda"), []
    words = torch.randint(megatron_model.WORDS, (32, megatron_model.SEQUENCE), device="cuda")
    positions = torch.arange(words.shape[1], device="cuda").expand_as(words)

    def forward_step(batches: Iterator[torch.Tensor], model: Any) -> Any:
        batch = next(batches)
        loss = model(batch, positions, None, labels=batch)
        return loss, lambda found: (found.float().mean(), {"loss": found.detach().float().mean()})

    def forward_backward(model: Any) -> None:
        model.cuda()
        done = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([words] * 3),
            model=model,
            num_microbatches=3,
            seq_length=words.shape[1],
            micro_batch_size=words.shape[0],
            forward_only=False,
        )
        losses.append(sum(each["loss"].item() for each in done))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()

    taken = names_taken("cuda", config) | {"steps": 5, "forward_backward": forward_backward}
    names = docs_code.run(docs_code.code_blocks()["adopting.md 1"], "cuda", **taken)
    assert losses[-1] < losses[0]
    (record,) = names["session"].records[-1:]
    assert record.bytes_out > 0 and "layer0/mlp.experts.activation.act_input" in capsys.readouterr().out
