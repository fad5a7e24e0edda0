"""Parts of a transformer layer as graphs on a GPU, with eager neighbours and offloading."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import pytest
import torch

from te_offload import Fate, OffloadSession, Reason
from te_offload.fused import hopper
from te_offload.graphs import capture_layers
from te_offload.graphs.layers.space import storage_over, tensor_of
from tests.support.layer_stack import EXPERTS, FFN, HIDDEN, TOKENS, batches, captured, grads
from tests.support.mlp import assert_same_bits, make_mlp

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quack", reason="quack-kernels, which has the GEMMs, is not installed here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are Hopper's (compute capability 9.0)")
    monkeypatch.setenv(hopper.SWITCH, "1")


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(8, TOKENS // 8, 3, 8, HIDDEN // 8).permute(2, 0, 3, 1, 4).unbind(0)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # whose backward is deterministic
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = x + self.out(mixed.transpose(1, 2).reshape(TOKENS, HIDDEN))
        return found


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, device="cuda", dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, expert = self.weight(x.float()).softmax(-1).max(-1)
        return scales, expert


class Preprocess(torch.nn.Module):
    """Sorts tokens by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        scales, expert = self.router(x)
        order = expert.argsort(stable=True)
        sizes = torch.zeros(EXPERTS, device="cuda", dtype=torch.int64).scatter_add_(0, expert, torch.ones_like(expert))
        return x[order], sizes, scales[order], order


class Block(torch.nn.Module):
    """Attention, router, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = torch.nn.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.preprocess = Preprocess()
        self.experts = make_mlp(experts=EXPERTS, hidden=HIDDEN, ffn=FFN, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        rows, sizes, scales, order = self.preprocess(self.norm(x))
        y = self.experts(rows, sizes, scales, sizes)
        return x.index_add(0, order, y)


SCOPES: dict[str, Callable[[Block], torch.nn.Module]] = {
    "attention": lambda block: block.attention,
    "router": lambda block: block.preprocess.router,
    "router and preprocess": lambda block: block.preprocess,
    "experts": lambda block: block.experts,
    "layer": lambda block: block,
}


@pytest.mark.parametrize("scope", SCOPES)
def test_scopes_of_a_transformer_layer_are_captured_with_eager_neighbours_and_offload(scope: str) -> None:
    stacks: list[list[Block]] = []
    for _ in range(2):
        torch.manual_seed(0)
        stacks.append([Block() for _ in range(2)])
    every = [x for x, _, _ in batches(8)]
    session = OffloadSession(stacks[1], min_bytes=0, max_in_flight=0)
    with capture_layers([SCOPES[scope](block) for block in stacks[1]], session=session, warmup=2) as graphs:
        for x in every:
            results = []
            for number, stack in enumerate(stacks):
                for parameter in torch.nn.ModuleList(stack).parameters():
                    parameter.grad = None
                y = x
                if number:
                    with session.step():
                        for block in stack:
                            y = block(y)
                        y.float().square().mean().backward()
                else:
                    for block in stack:
                        y = block(y)
                    y.float().square().mean().backward()
                results.append((y.detach().clone(), grads(torch.nn.ModuleList(stack))))
                del y
            assert torch.equal(results[0][0], results[1][0])
            assert_same_bits(results[0][1], results[1][1])
        captured(graphs)
        rows = {row.slot.value: row for row in session.records[-1].slots}
        assert rows["act_input"].fate is Fate.OFFLOADED, session.report()
        if scope == "experts":
            assert rows["fc1_input"].reason is Reason.CROSSES_BORDER
        else:
            assert rows["fc1_input"].fate is Fate.OFFLOADED
    session.close()


WIDE = TOKENS * 4 * HIDDEN * 4  # bytes


class Neighbour(torch.nn.Module):
    """Not captured; saves one tensor, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, 4 * HIDDEN, device="cuda"))
        self.address: int | None = None
        self.freed: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().repeat(1, 4)
        if self.address is not None:
            place = torch.nn.Module()  # any object that can be watched
            weakref.finalize(place, self.freed.append, self.address)
            storage = storage_over(self.address, WIDE, wide.device, place)
            wide = tensor_of(storage, wide.dtype, wide.size(), wide.stride(), 0).copy_(wide)
        return (wide * self.scale).view(TOKENS, 4, HIDDEN).sum(1).bfloat16()


def test_saved_tensor_of_a_neighbour_keeps_out_of_addresses_that_a_graph_has_got_meanwhile() -> None:
    """Before a capture freed memory goes back to the driver, which may hand out the same addresses."""
    stacks, neighbours = [], []
    for _ in range(2):
        torch.manual_seed(0)
        neighbours.append(Neighbour())
        norm = torch.nn.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)
        stacks.append(torch.nn.ModuleList([neighbours[-1], norm, Attention()]))
    session = OffloadSession(stacks[1], min_bytes="1MiB", max_in_flight=0)
    with capture_layers([stacks[1][2]], session=session, warmup=1) as graphs:
        space = graphs._ground.space
        memory = space.bank.memory
        reserve, free = memory.reserve, memory.free
        there, piece = reserve(WIDE), memory.create(WIDE)
        assert piece is not None
        memory.map(there, [(piece, WIDE)])
        given: list[int] = []

        def reserve_there(nbytes: int) -> int:
            if not neighbours[1].freed or given:
                return reserve(nbytes)
            torch.cuda.synchronize()
            memory.unmap(there, WIDE)
            given.append(nbytes)
            return there

        def free_there(address: int, nbytes: int) -> None:
            free(address, WIDE if address == there else nbytes)

        memory.reserve = reserve_there  # type: ignore[method-assign]
        memory.free = free_there  # type: ignore[method-assign]
        for step, (x, _, _) in enumerate(batches(4)):
            neighbours[1].address = there if step == 1 else None  # in whose forward the graphs are captured
            results = []
            for number, stack in enumerate(stacks):
                stack.zero_grad()
                with session.step() if number else contextlib.nullcontext():
                    y = x
                    for layer in stack:
                        y = layer(y)
                    y.float().square().mean().backward()
                results.append((y.detach().clone(), grads(stack)))
                del y
            assert torch.equal(results[0][0], results[1][0])
            assert_same_bits(results[0][1], results[1][1])
        captured(graphs)
        assert given and given[0] <= WIDE and space.zones(there, 1)
        rows = [row for row in session.records[-1].slots if row.layer == "layer0" and row.nbytes >= WIDE]
        assert rows and rows[0].fate is Fate.OFFLOADED, session.report()
    memory.release(piece)
    session.close()
