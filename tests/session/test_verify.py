"""``verify=True``, and the engine on copies that are late, reordered or torn.

The seeded bugs are small copies of ones that other projects had; the numbers are those of the table of failures in
docs/design.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import OffloadSession, Outcome
from te_offload.errors import CorruptionError
from te_offload.offload import engine as engine_module
from te_offload.offload.cargo import Cargo
from te_offload.offload.mover import Mover
from te_offload.offload.states import SlotState
from te_offload.offload.timeline import Key
from te_offload.offload.transfer import Mark
from tests.session.test_bits import Layer
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.late_copies import LateTransfer
from tests.support.mlp import assert_same_bits, make_inputs, run

pytestmark = pytest.mark.usefixtures("alone_and_together")


def use(monkeypatch: pytest.MonkeyPatch, transfer: LateTransfer, mover: type[Mover] = Mover) -> None:
    monkeypatch.setattr(engine_module, "make_transfer", lambda device, stream: transfer)
    monkeypatch.setattr(engine_module, "Mover", mover)


@pytest.mark.parametrize("max_in_flight", [0, 4096, "1GiB"])
@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4, 5])
def test_late_copies_change_no_bit(monkeypatch: pytest.MonkeyPatch, seed: int | None, max_in_flight: Any) -> None:
    use(monkeypatch, LateTransfer(seed))
    expected, model = Stack(4), Stack(4)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=max_in_flight, verify=True) as session:
        for step in range(4):
            with session.step():
                found = run(model, SPLITS, seed=step)
            assert_same_bits(run(expected, SPLITS, seed=step), found)
            record = session.records[-1]
            never_left = sum(row.bytes_out for row in record.slots if row.outcome is Outcome.RECALLED)
            assert record.bytes_back + never_left == record.bytes_out == 4 * 10 * (16 + 32 + 32) * 4
            assert (record.bytes_back > 0) or max_in_flight == "1GiB"


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_late_copies_change_no_bit_with_many_forwards_before_their_backwards(
    monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    use(monkeypatch, LateTransfer(seed))
    expected, model = Stack(3), Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=2048, verify=True) as session:
        for order in ((0, 1, 2), (2, 0, 1), (2, 1, 0), (0, 1, 2)):
            results = []
            for module in (expected, model):
                module.zero_grad()
                inputs = [make_inputs(SPLITS, seed=each) for each in range(3)]
                with session.step():
                    losses = [module(x, sizes, scales, sizes).square().sum() for x, sizes, scales in inputs]
                    for index in order:
                        losses[index].backward()
                results.append([x.grad for x, _, _ in inputs] + [p.grad for p in module.parameters()])
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other)
            assert session.records[-1].bytes_back > 0


def test_torn_copy_is_named_with_its_slot_and_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LateTransfer(tear=True))
    model = Stack(2)
    named = pytest.raises(CorruptionError, match=r"layer\d/\d\.\w+_input, forward 0: .* the first one is byte \d+, 0x")
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0, verify=True) as session, session.step(), named:
        run(model, SPLITS)


class _Spoils(Mover):
    """Changes one byte of what comes back: the first, or the last, of the first tensor of each slot in turn."""

    turn, last, expected = 0, False, ""

    def send_out(self, cargo: Cargo, sources: Any) -> None:
        cargo.notes = [  # type: ignore[attr-defined]
            (user.name, user.held[0].data_ptr() + (user.held[0].nbytes - 1 if _Spoils.last else 0))
            for user in (reference() for reference in cargo.users)
            if user is not None
        ]
        super().send_out(cargo, sources)

    def start_back(self, cargo: Cargo, free: Mark) -> None:
        super().start_back(cargo, free)
        if cargo.back is None or _Spoils.expected:
            return
        cargo.back.ended.wait()
        notes = cargo.notes  # type: ignore[attr-defined]
        _Spoils.expected, address = notes[_Spoils.turn % len(notes)]
        for (start, nbytes), (lot, begin) in zip(cargo.runs, cargo.places, strict=True):
            if start <= address < start + nbytes:
                assert lot.memory is not None
                whole = lot.memory.as_strided((lot.memory.numel(),), (1,)).view(torch.uint8)
                whole[begin + address - start] += 1


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("kind", ["a tensor an expert", "a tensor"])
def test_first_and_last_byte_of_a_slot_are_named_as_its_own(
    monkeypatch: pytest.MonkeyPatch, kind: str, turn: int, last: bool
) -> None:
    use(monkeypatch, LateTransfer(), _Spoils)
    for name, value in (("turn", turn), ("last", last), ("expected", "")):
        monkeypatch.setattr(_Spoils, name, value)
    model = Stack(2)
    plain = [Layer(lambda: [torch.full((40 + extra,), extra + 1.0) for extra in range(3)]) for _ in range(3)]
    owners = model.layers if kind == "a tensor an expert" else plain
    named = pytest.raises(CorruptionError, match=r"forward 0: .* 1 of \d+ bytes differ")
    with OffloadSession(owners, min_bytes=0, max_in_flight=0, verify=True) as session, session.step(), named as error:
        if owners is plain:
            plain[2](plain[1](plain[0](torch.ones(4, requires_grad=True)))).sum().backward()
        else:
            run(model, SPLITS)
    assert _Spoils.expected and str(error.value).startswith(f"{_Spoils.expected}, forward 0")


def test_bytes_beside_a_slots_tensors_may_change_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.arange(1024, dtype=torch.int32).numpy()
    whole = torch.from_numpy(memory)
    parts = [whole[64:96], whole[112:144]]
    expected = [part.clone() for part in parts]

    class Writes(Mover):
        """Writes beside the tensors before each copy out."""

        def send_out(self, cargo: Cargo, sources: Any) -> None:
            memory[:64], memory[96:112], memory[144:] = -1, -1, -1
            super().send_out(cargo, sources)

    use(monkeypatch, LateTransfer(), Writes)
    layers = [Layer(lambda: parts), *[Layer(lambda: [torch.ones(200)]) for _ in range(2)]]
    with OffloadSession(layers, min_bytes=0, max_in_flight=0, verify=True) as session:
        with session.step():
            layers[2](layers[1](layers[0](torch.ones(4, requires_grad=True)))).sum().backward()
        assert session.records[-1].bytes_back >= 2 * 128
    found = layers[0].seen[0]
    assert all(torch.equal(part, before) for part, before in zip(found, expected, strict=True))
    assert found[0].data_ptr() != parts[0].data_ptr()


def test_without_verify_a_torn_copy_is_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LateTransfer(tear=True))
    model = Stack(2)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session, session.step():
        found = run(model, SPLITS)
    with pytest.raises(AssertionError):
        assert_same_bits(run(Stack(2), SPLITS), found)


class ReloadsTooEarly(Mover):
    """MLM#7398 (1): the copy back does not wait for its own copy out."""

    def settle(self, after: Key | None = None) -> None:
        self.alive = [*getattr(self, "alive", []), *(cargo.sources for cargo in self._leaving)]
        while self._leaving:
            self._let_go(self._leaving.popleft())

    def start_back(self, cargo: Cargo, free: Mark) -> None:
        out = cargo.out
        if out is not None:
            cargo.out = type(out)(out.began, free)
        super().start_back(cargo, free)
        cargo.out = out


class FreesTooEarly(Mover):
    """TU#1867 (3): the saved tensors are let go while the copy out still reads them, and their memory is used again."""

    def settle(self, after: Key | None = None) -> None:
        while self._leaving:
            cargo = self._leaving.popleft()
            for tensor in cargo.sources or []:
                tensor.data.view(torch.uint8).fill_(0xAB)  # what the next owner of the memory would do
            self._let_go(cargo)


class KnowsByAddress(Mover):
    """TRL#6241 (5): what lies at an address that was copied before counts as copied, though it was used again."""

    known: set[int]

    def send_out(self, cargo: Cargo, sources: Any) -> None:
        super().send_out(cargo, sources)
        key = cargo.runs[0].address
        if key in self.known and cargo.out is not None:
            cargo.out.ended.pieces = []  # type: ignore[attr-defined]
        self.known.add(key)


def test_reordered_copies_change_no_bit_where_each_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LateTransfer(reorder=True))
    expected, model = Stack(4), Stack(4)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0, verify=True) as session:
        for step in range(3):
            with session.step():
                found = run(model, SPLITS, seed=step)
            assert_same_bits(run(expected, SPLITS, seed=step), found)
        assert session.records[-1].bytes_back > 0


def test_copy_that_overtakes_the_one_before_it_is_caught_where_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class WaitsForNothing(ReloadsTooEarly):
        """Relies on the order of copies alone, with a link that does not keep it."""

        start_back = Mover.start_back

    use(monkeypatch, LateTransfer(reorder=True), WaitsForNothing)
    model = Stack(3)
    caught = pytest.raises(CorruptionError, match="after its way to the host and back")
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0, verify=True) as session, caught, session.step():
        run(model, SPLITS)


@pytest.mark.parametrize("bug", [ReloadsTooEarly, FreesTooEarly, KnowsByAddress])
def test_seeded_bug_is_caught_by_verify(monkeypatch: pytest.MonkeyPatch, bug: type[Mover]) -> None:
    KnowsByAddress.known = set()
    use(monkeypatch, LateTransfer(), bug)
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0, verify=True) as session:
        found = None
        for seed in range(20):  # until the allocator hands out an address again
            try:
                with session.step():
                    run(model, SPLITS, seed=seed)
            except CorruptionError as error:
                found = error
                break
        assert found is not None and "after its way to the host and back" in str(found)


def test_verify_checks_every_slot_that_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LateTransfer())
    model = Stack(4)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0, verify=True) as session:
        with session.step():
            run(model, SPLITS)
        engine = session._engine
        assert engine is not None and engine.verifier is not None
        came_back = [row for row in session.records[-1].slots if row.outcome in (Outcome.HIT, Outcome.LATE)]
        assert engine.verifier.checked == len(came_back) >= 8


def test_states_of_slots_only_follow_the_table_under_late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[SlotState, SlotState]] = set()
    move = Cargo.move

    def watched(self: Cargo, to: SlotState) -> None:
        seen.add((self.state, to))
        move(self, to)

    monkeypatch.setattr(Cargo, "move", watched)
    use(monkeypatch, LateTransfer(7))
    model = Stack(4)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=4096) as session:
        for step in range(3):
            with session.step():
                run(model, SPLITS, seed=step)
    assert {to for _, to in seen} >= {SlotState.LEAVING, SlotState.ON_HOST, SlotState.RETURNING, SlotState.RETURNED}
