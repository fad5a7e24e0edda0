"""The backend of torch.compile that captures forward and backward, on a backend of captures that needs no GPU."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_offload.errors import BackwardTwiceError, CaptureError
from te_offload.graphs import CudagraphBackend
from te_offload.graphs.collectives import conflict
from te_offload.graphs.handover import Handover
from te_offload.graphs.holding import users_of
from te_offload.graphs.layers.space import storage_over, tensor_of
from tests.support.fake_graphs import FakeBackend


class Net(torch.nn.Module):
    """Two linear layers and what lies between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x + self.second(torch.nn.functional.silu(self.first(x))))
        return found


@pytest.fixture
def backend() -> Iterator[CudagraphBackend]:
    torch._dynamo.reset()
    found = CudagraphBackend(make_backend=lambda device: FakeBackend())
    yield found
    found.close()
    torch._dynamo.reset()


def data(count: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=random) for _ in range(count)]


def eager_calls(backend: CudagraphBackend) -> tuple[dict[str, int], dict[str, int]]:
    backward = backend.backwards[0]
    assert backward is not None and backward.holding is not None
    holding = backend.forwards[0].holding
    assert holding is not None
    return dict(holding.eager), dict(backward.holding.eager)


def same(one: torch.nn.Module, other: torch.nn.Module, *, grads: bool = False) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) if grads and a.grad is not None and b.grad is not None else torch.equal(a, b)
               for a, b in pairs)  # fmt: skip


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_through_the_backend_gives_the_bits_of_eager_training(
    backend: CudagraphBackend, set_to_none: bool
) -> None:
    eager, net = Net(), Net()
    compiled: Any = torch.compile(net, backend=backend)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (eager, net)]
    for x in data(12):
        losses = []
        for call, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = call(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            del loss
        assert torch.equal(*losses)
    assert same(eager, net)
    forward, backward = eager_calls(backend)
    assert forward == {}
    assert backward == {}  # gradients that stay are those of the first backward, which no graph computed
    captures = [*backend.forwards[0].captures, *backend.backwards[0].captures]  # type: ignore[union-attr]
    assert all(one is not None and one._graph.replays >= 6 for one in captures)


def test_saved_tensors_of_a_captured_forward_are_static_for_the_backward(backend: CudagraphBackend) -> None:
    net = Net()
    compiled = torch.compile(net, backend=backend)
    for x in data(6):
        compiled(x).sum().backward()
        net.zero_grad()
    backward = backend.backwards[0]
    assert backward is not None
    (capture,) = backward.captures
    assert capture is not None
    moving = [leaf.name for leaf in capture._signature.leaves if leaf.kind.name == "MOVES"]
    assert len(moving) <= 2, moving  # the tangent, and the input, which the forward saved as it came


def test_second_forward_before_the_backward_is_not_replayed(backend: CudagraphBackend) -> None:
    eager, net = Net(), Net()
    compiled = torch.compile(net, backend=backend)
    batches = data(8)
    for x in batches[:5]:
        compiled(x).sum().backward()
    for one in (eager, net):
        one.zero_grad()
    for call in (eager, compiled):
        losses = [call(x).square().sum() for x in batches[5:]]
        for loss in losses:
            loss.backward()
    assert same(eager, net, grads=True)
    assert eager_calls(backend)[0] == {"a backward is still to come": 2}


def test_backward_is_captured_over_what_its_own_forward_lent(backend: CudagraphBackend) -> None:
    """Not over what a forward has saved that ran eagerly, while the lent memory still waits for its own backward."""
    eager, net = Net(), Net()
    compiled = torch.compile(net, backend=backend)
    batches = data(9)
    for x in batches[:3]:
        compiled(x).square().sum().backward()
    for first, second in zip(batches[3::2], batches[4::2], strict=True):  # the first one's forward is a graph by now
        for one, call in ((eager, eager), (net, compiled)):
            one.zero_grad()
            losses = [call(x).square().sum() for x in (first, second)]
            for loss in reversed(losses):
                loss.backward()
        assert same(eager, net, grads=True)
    assert eager_calls(backend)[1]["its forward was not replayed"] == 1
    backward = backend.backwards[0]
    assert backward is not None and backward.captures[0] is not None and backward.captures[0].captures == 1


def test_outputs_and_gradients_that_are_held_do_not_change(backend: CudagraphBackend) -> None:
    net = Net()
    compiled = torch.compile(net, backend=backend)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for x in data(16):
        for parameter in net.parameters():
            parameter.grad = None
        y = compiled(x)
        y.sum().backward()
        grad = net.first.weight.grad
        assert grad is not None
        held += [(y, y.detach().clone()), (grad, grad.clone())]
    assert all(torch.equal(one, copy) for one, copy in held)
    forward, backward = eager_calls(backend)
    assert forward == {"an output of an earlier call is held": 3}  # then new graphs, and copies
    assert backward == {"an output of an earlier call is held": 2, "its forward is not a graph yet": 1}
    captures = [*backend.forwards[0].captures, *backend.backwards[0].captures]  # type: ignore[union-attr]
    assert all(one is not None and one._graph.replays >= 4 for one in captures)


def test_output_that_is_held_until_the_next_one_is_there_costs_one_eager_call(backend: CudagraphBackend) -> None:
    compiled = torch.compile(Net(), backend=backend)
    for x in data(10):
        y = compiled(x)
        y.sum().backward()
    assert eager_calls(backend)[0] == {"an output of an earlier call is held": 1}


def test_no_grad_calls_have_graphs_of_their_own(backend: CudagraphBackend) -> None:
    eager, net = Net(), Net()
    compiled = torch.compile(net, backend=backend)
    for x in data(6):
        with torch.no_grad():
            assert torch.equal(compiled(x), eager(x))
        assert torch.equal(compiled(x).detach(), eager(x).detach())
    assert len(backend.forwards) == 2 and "a CUDA graph" in backend.report()


def test_part_that_cannot_be_captured_leaves_all_right(backend: CudagraphBackend) -> None:
    failing = CudagraphBackend(make_backend=lambda device: FakeBackend("begin"))
    eager, net = Net(), Net()
    compiled = torch.compile(net, backend=failing)
    for x in data(7):
        for call in (eager, compiled):
            call(x).square().sum().backward()
    assert same(eager, net, grads=True)
    assert "could not be captured: RuntimeError: injected: begin" in failing.report()
    assert "calls ran eagerly: a part could not be captured" in failing.report()


@pytest.mark.parametrize(
    ("environment", "hangs"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:true"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_settings_with_which_captured_collectives_hang_are_known(environment: dict[str, str], hangs: bool) -> None:
    """Failure 20."""
    why = conflict(environment)
    assert (why is not None) is hangs
    assert why is None or "NCCL_GRAPH_REGISTER=0" in why


def test_collectives_are_not_captured_with_settings_with_which_they_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_offload.graphs.collectives import check_collectives

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    with pytest.raises(CaptureError, match="before the process group is made"):
        check_collectives(torch.device("cuda"))
    check_collectives(torch.device("cpu"))


def test_static_inputs_that_moved_run_eagerly_until_they_stay() -> None:
    from te_offload.graphs.holding import Holding

    def run(inputs: list[Any]) -> Any:
        return inputs

    holding = Holding(run, [True], ())
    first, second = torch.ones(3), torch.ones(3)
    assert holding.why_eagerly([first]) is None
    holding.hand_out([], [], holding.places_of([first]), copies=False)
    assert holding.why_eagerly([first]) is None
    assert [holding.why_eagerly([second]) for _ in range(3)] == ["a static input is somewhere else"] * 2 + [None]


def test_gradients_are_the_graphs_own_memory_though_their_op_makes_them_in_another_order(
    backend: CudagraphBackend,
) -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 8, 16))  # folded into one matrix, and its gradient unfolded

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(x, self.weight).relu().sum(0)

    experts = Experts()
    compiled: Any = torch.compile(experts, backend=backend)
    for _ in range(6):
        experts.zero_grad()
        compiled(torch.randn(4, 8, requires_grad=True)).sum().backward()
    backward = backend.backwards[0]
    assert backward is not None and backward.captures[0] is not None
    gradient = experts.weight.grad
    assert gradient is not None and gradient.is_contiguous()
    assert gradient.data_ptr() in {one.data_ptr() for one in backward.captures[0]._graph._outputs if one is not None}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_gradient_of_an_input_that_is_no_parameter_keeps_its_layout(backend: CudagraphBackend) -> None:
    class Folded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(self.rows, x).relu().sum(0)

    strides = []
    for compiler in ("aot_eager", backend):
        torch._dynamo.reset()
        compiled: Any = torch.compile(Folded(), backend=compiler)
        seen: list[tuple[int, ...]] = []
        for _ in range(6):
            x = torch.randn(3, 8, 16, requires_grad=True) * 2
            x.register_hook(lambda grad, seen=seen: seen.append(grad.stride()))
            compiled(x).sum().backward()
        strides.append(seen)
    assert strides[0] == strides[1] and strides[0][0] != (128, 16, 1)


def test_calls_that_are_no_replay_let_go_of_what_is_saved_after_its_last_use(
    backend: CudagraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[int, int]] = []

    def run_boxed(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        storages = {
            one.data_ptr(): one.untyped_storage()
            for name, one in zip(names, inputs, strict=True)
            if not name.startswith("tangents")  # the graph has its own copy
        }
        for known in (x, *net.parameters()):
            storages.pop(known.data_ptr(), None)

        class Counting(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                if n.op == "output":
                    held.append((len(storages), sum(users_of(one) > 1 for one in storages.values())))
                return super().run_node(n)

        return Counting(module).boxed_run(inputs)  # type: ignore[no-untyped-call]

    net, x = Net(), torch.randn(4, 8)
    compiled: Any = torch.compile(net, backend=backend)
    monkeypatch.setattr("te_offload.graphs.parts.run_boxed", run_boxed)
    for _ in range(3):
        loss = compiled(x).sum()
        loss.backward()
        del loss
    assert len(held) == 3 and min(many for many, _ in held) > 2
    assert not any(one for _, one in held)


@pytest.fixture
def spoils(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a backward's graph does to saved tensors: their memory serves again. The addresses, as often as it happens."""
    found: list[int] = []
    replayed, lend = Handover.backward_replayed, Handover.lend
    lengths: dict[int, int] = {}

    def note(self: Handover, outputs: Any, saved: Any, others: Any) -> list[Any]:
        result = lend(self, outputs, saved, others)
        for one, other in zip(outputs, result, strict=True):
            if one is not other:
                lengths[one.data_ptr()] = one.untyped_storage().nbytes()
        return result

    def spoil(self: Handover) -> None:
        replayed(self)
        for address in self._places:
            ctypes.memset(address, 0xFF, lengths[address])
            found.append(address)

    monkeypatch.setattr(Handover, "lend", note)
    monkeypatch.setattr(Handover, "backward_replayed", spoil)
    return found


@pytest.mark.parametrize("holds", ["nothing", "outputs", "gradients", "losses"])
def test_nobody_reads_what_the_forward_saved_once_the_backward_has_worked_there(
    backend: CudagraphBackend, spoils: list[int], holds: str
) -> None:
    eager, net = Net(), Net()
    compiled: Any = torch.compile(net, backend=backend)
    held: list[Any] = []
    for number, x in enumerate(data(24)):
        found = []
        for call, model in ((eager, eager), (compiled, net)):
            if holds != "gradients" or number % 3 == 0:
                model.zero_grad()
            y = call(x)
            loss = y.square().sum()
            loss.backward()
            found.append(loss.detach().clone())
            held = [*held[-5:], {"nothing": 0, "outputs": y, "losses": loss, "gradients": 0}[holds]]
            del y, loss
        assert torch.equal(*found), number
        assert same(eager, net, grads=True), number
    assert len(spoils) >= 5 * 6, backend.report()


@torch._functorch.config.patch(donated_buffer=False)  # with which torch itself refuses
def test_second_backward_over_one_forward_is_an_error_once_the_backward_is_a_graph(backend: CudagraphBackend) -> None:
    net = Net()
    compiled = torch.compile(net, backend=backend)
    for x in data(5):
        compiled(x).sum().backward()
        net.zero_grad()
    loss = compiled(data(1)[0]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(BackwardTwiceError, match="second backward"):
        loss.backward()
    del loss
    net.zero_grad()
    compiled(data(1)[0]).sum().backward()  # and the next step is right
    expected = Net()
    expected(data(1)[0]).sum().backward()
    assert same(expected, net, grads=True)


def test_saved_tensors_have_no_owner_once_the_backward_is_captured() -> None:
    memory, keeper, cpu = torch.ones(8), Handover(torch.device("cpu")), torch.device("cpu")
    owner = tensor_of(storage_over(memory.data_ptr(), 32, cpu, keeper), torch.float32, (8,), (1,), 0)
    owned_by = weakref.ref(keeper)
    del keeper
    handover = Handover(cpu)
    lent, kept = handover.lend([owner, torch.ones(2)], {0}, set())
    assert lent.data_ptr() == owner.data_ptr() and torch.equal(lent, torch.ones(8)) and kept.shape == (2,)
    del owner
    assert owned_by() is not None
    (owned,) = handover.owned([lent])
    assert owned_by() is not None and owned.data_ptr() == lent.data_ptr()
    del owned
    assert owned_by() is None
    with pytest.raises(CaptureError, match="captured anew"):
        handover.owned([lent])
    assert handover.renews


def test_saved_tensor_that_is_also_returned_keeps_its_owner() -> None:
    x = torch.ones(8)
    handover = Handover(torch.device("cpu"))
    outputs = [x, x.view(2, 4), torch.zeros(3)]
    assert all(a is b for a, b in zip(handover.lend(outputs, {1}, set()), outputs, strict=True))
    assert all(a is b for a, b in zip(handover.lend(outputs, {2}, {outputs[2].data_ptr()}), outputs, strict=True))


def test_gradients_that_are_held_for_good_cost_some_eager_calls_and_new_graphs(
    backend: CudagraphBackend, spoils: list[int]
) -> None:
    eager, net, held = Net(), Net(), list[tuple[torch.Tensor, torch.Tensor]]()
    compiled: Any = torch.compile(net, backend=backend)
    for number, x in enumerate(data(20)):
        for call, model in ((eager, eager), (compiled, net)):
            for parameter in model.parameters():
                parameter.grad = None
            call(x).square().sum().backward()
        assert same(eager, net, grads=True), number
        held += [(one.grad, one.grad.clone()) for one in net.parameters() if one.grad is not None]
    assert all(torch.equal(one, copy) for one, copy in held)
    forward, _ = eager_calls(backend)
    assert forward == {"a gradient of an earlier call is held": 3}
    captures = [*backend.forwards[0].captures, *backend.backwards[0].captures]  # type: ignore[union-attr]
    assert all(one is not None and one._graph.replays >= 8 for one in captures), backend.report()
    assert spoils
