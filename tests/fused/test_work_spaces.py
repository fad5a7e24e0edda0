"""Work spaces of zeros: each is somebody's alone."""

from __future__ import annotations

import threading

import pytest
import torch

from te_offload.fused.kernels.work_spaces import AT_ONCE, WorkSpaces

COUNT = 129


class Card:
    """Has the CPU's memory and a current stream."""

    type, index = "cuda", 0
    stream, captures = 7, False
    zeroed: int = 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card, zeros = Card(), torch.zeros

    def on_card(*size: int, dtype: torch.dtype, device: Card) -> torch.Tensor:
        card.zeroed += 1
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_card)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.captures)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: card.stream, raising=False)
    return card


def places(found: list[torch.Tensor]) -> list[int]:
    return sorted(one.data_ptr() for one in found)


def test_each_is_zero_and_nobody_elses(card: Card) -> None:
    spaces, found = WorkSpaces(), []
    for number in range(3 * AT_ONCE):
        space = spaces.get(COUNT, card)  # type: ignore[arg-type]
        assert space.shape == (COUNT,) and space.dtype is torch.int32 and space.is_contiguous()
        assert not space.any()
        space.fill_(number + 1)
        found.append(space)
    assert (
        [int(space.min()) for space in found] == [int(space.max()) for space in found] == [*range(1, 3 * AT_ONCE + 1)]
    )
    assert card.zeroed == 3


def test_each_begins_at_512_bytes_behind_another(card: Card) -> None:
    spaces = WorkSpaces()
    found = places([spaces.get(COUNT, card) for _ in range(AT_ONCE)])  # type: ignore[arg-type]
    assert {one - found[0] for one in found} == {1024 * number for number in range(AT_ONCE)}


def test_another_size_and_another_stream_have_their_own(card: Card) -> None:
    spaces = WorkSpaces()
    for stream, count in ((7, COUNT), (7, 4), (8, COUNT), (7, COUNT), (8, 4)):
        card.stream = stream
        assert spaces.get(count, card).shape == (count,)  # type: ignore[arg-type]
    assert card.zeroed == 4


def test_each_is_zeroed_by_itself_in_a_capture(card: Card) -> None:
    spaces = WorkSpaces()
    spaces.get(COUNT, card)  # type: ignore[arg-type]
    card.captures = True
    captured = [spaces.get(COUNT, card) for _ in range(3)]  # type: ignore[arg-type]
    assert card.zeroed == 4 and [space._base for space in captured] == [None] * 3
    card.captures = False
    spaces.get(COUNT, card)  # type: ignore[arg-type]
    assert card.zeroed == 4


def test_threads_never_share_one(card: Card) -> None:
    spaces, found = WorkSpaces(), []

    def take() -> None:
        for _ in range(2000):
            found.append(spaces.get(4, card))  # type: ignore[arg-type]

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(places(found))) == len(found) == 8000


def test_of_the_cpu_each_is_made_anew() -> None:
    spaces = WorkSpaces()
    one, other = (spaces.get(4, torch.device("cpu")) for _ in range(2))
    assert not one.any() and one.data_ptr() != other.data_ptr() and one._base is None
