"""Sessions in several threads, and forwards and backwards in other threads than their step's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from te_offload import OffloadSession
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.mlp import assert_same_bits, make_inputs, run


def test_sessions_in_several_threads_at_once_know_nothing_of_each_other() -> None:
    expected = run(Stack(2), SPLITS)

    def train(model: Stack) -> int:
        with OffloadSession(model.layers, min_bytes=0) as session:
            for _ in range(8):
                with session.step():
                    found = run(model, SPLITS)
                assert_same_bits(expected, found)
            assert [record.index for record in session.records] == [4, 5, 6, 7]
            assert session.records[-1].bytes_out == session.records[-1].bytes_back
            return session.records[-1].bytes_out

    models = [Stack(2) for _ in range(4)]  # here: each seeds the one generator of the process
    with ThreadPoolExecutor(len(models)) as threads:
        moved = list(threads.map(train, models))
    assert len(set(moved)) == 1 and moved[0] > 0


def test_forward_and_backward_in_other_threads_than_their_step_give_the_same_bits() -> None:
    expected, model = Stack(2), Stack(2)
    wanted = run(expected, SPLITS)
    with OffloadSession(model.layers, min_bytes=0) as session, ThreadPoolExecutor(1) as thread:
        with session.step():
            assert_same_bits(wanted, thread.submit(run, model, SPLITS).result())
        assert session.records[-1].bytes_out == session.records[-1].bytes_back > 0


def test_backward_in_another_thread_than_its_forward_gives_the_same_bits() -> None:
    expected, model = Stack(2), Stack(2)
    x, sizes, scales = make_inputs(SPLITS)
    expected(x, sizes, scales, sizes).sum().backward()
    with OffloadSession(model.layers, min_bytes=0) as session, ThreadPoolExecutor(1) as thread:
        with session.step():
            loss = model(x, sizes, scales, sizes).sum()
            thread.submit(loss.backward).result()
        assert session.records[-1].bytes_out == session.records[-1].bytes_back > 0
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


class _Recursive(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return y if depth == 0 else self(y, depth - 1) * y


def test_layer_that_calls_itself_gives_the_same_bits() -> None:
    expected, model = _Recursive(), _Recursive()
    x = torch.linspace(-1, 1, 32).view(4, 8)
    expected(x, 3).sum().backward()
    with OffloadSession(model, min_bytes=0) as session, session.step():
        model(x, 3).sum().backward()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    record = session.records[-1]
    assert record.bytes_out == record.bytes_back > 0
    assert sorted(row.forward for row in record.slots) == [0, 1, 2, 3]
