"""Regions that share memory within a limit of the device: an attention's output, which its projection saves too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from tests.support.device_peaks import STEPS, backward_of_a_wide_loss, peak_of_steps
from tests.support.mlp import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAYERS, WIDTH, HEADS, SEQUENCES = 8, 1024, 8, 4
OUTPUT = 2 * WIDTH  # bytes of a token's


class Block(torch.nn.Module):
    """Attention and its projection, a region each, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        like: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, **like)
        self.out = torch.nn.Linear(WIDTH, WIDTH, **like)
        self.session: OffloadSession | None = None

    def region(self, name: str) -> Any:
        """The session's, if there is one."""
        return contextlib.nullcontext() if self.session is None else self.session.region(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).view(SEQUENCES, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        with self.region("core_attn"):
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        with self.region("projection"):
            y = self.out(mixed.transpose(1, 2).reshape(x.shape))
        found: torch.Tensor = x + y
        return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))

    def let(self, session: OffloadSession | None) -> None:
        """Regions are that session's from now on."""
        for block in self.blocks:
            block.session = session  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(model: Model, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients, after a loss that takes memory of its own."""
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=False)
    y = model(x)
    backward_of_a_wide_loss(y)
    assert x.grad is not None
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"x": x.grad, **found}


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's flash attention adds gradients in no order else."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_regions_that_share_memory_stay_within_the_limit_and_no_bit_changes(share: float) -> None:
    random = torch.Generator(device="cuda").manual_seed(1)
    tokens, model = SEQUENCES * 1024, Model()
    given = [torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16, generator=random) for _ in range(STEPS)]

    def step(number: int) -> None:
        train(model, given[number])

    most, _, _ = peak_of_steps(model.blocks, step, enabled=False)
    with OffloadSession(model.blocks, min_bytes=0) as session:
        model.let(session)
        with session.step():
            train(model, given[0])
        model.let(None)
        (shared,) = {each for each in session.records[-1].shared_memory if each.layer == "layer0"}
    assert shared.nbytes >= tokens * OUTPUT
    assert shared.slots == ("layer0/core_attn.region", "layer0/projection.region")
    least, all_out, _ = peak_of_steps(model.blocks, step, told=model.let)
    limit = int(most - share * (most - least))
    peak, out, session = peak_of_steps(model.blocks, step, told=model.let, device_limit=limit)
    assert session.plan is not None and session.plan.forecast is not None
    print(f"\nmost {most} least {least} limit {limit} peak {peak} out {out} of {all_out} {session.plan.forecast}")
    assert peak <= limit
    assert 0 < out < all_out
    assert session.plan.forecast.device_bytes == pytest.approx(peak, abs=16 << 20)
    expected = {name: grad.clone() for name, grad in train(model, given[0]).items()}
    with OffloadSession(model.blocks, min_bytes=0, plan=session.plan) as again:
        model.let(again)
        with again.step():
            found = train(model, given[0])
        model.let(None)
        assert again.records[-1].bytes_back > 0
    assert_same_bits(expected, found)
