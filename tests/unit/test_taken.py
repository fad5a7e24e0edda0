"""Parts that `torch.split` cut from rows leave as the one tensor that they are, and come back as the same parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from te_offload.ops.te_adapter.carry import Taken
from tests.support import mlp

SIZES = (4, 0, 6, 1)
COLUMNS = 8


class Away:
    """A handle whose tensors are copies, somewhere else."""

    name = "fc1_input"

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.clone() for tensor in tensors]

    @property
    def is_here(self) -> bool:
        return False

    def take(self) -> list[torch.Tensor]:
        return self.tensors


def assert_same_bits(expected: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    one, other = (
        {str(number): part for number, part in enumerate(parts) if part is not None} for parts in (expected, found)
    )
    mlp.assert_same_bits(one, other)


def rows(before: int = 0) -> torch.Tensor:
    """So many rows as there are sizes for, behind some others of the same storage."""
    with torch.no_grad():
        return torch.randn(before + sum(SIZES), COLUMNS)[before:]


def back(parts: Sequence[torch.Tensor | None]) -> tuple[int, list[torch.Tensor | None]]:
    """How many tensors leave of a slot, and what comes back."""
    taken = Taken(range(len(parts)), parts)
    taken.handle = Away(taken.buffers)
    return len(taken.buffers), taken.bring()


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 11, 0), (11, 0), (0, 11)])
def test_parts_of_a_split_leave_as_one_tensor(sizes: tuple[int, ...], before: int) -> None:
    parts = rows(before).split(sizes)
    tensors, found = back(parts)
    assert tensors == 1
    assert_same_bits(parts, found)


def test_the_one_tensor_is_where_the_parts_are() -> None:
    parts = rows(3).split(SIZES)
    (whole,) = Taken(range(len(parts)), parts).buffers
    assert whole.data_ptr() == parts[0].data_ptr() and whole.nbytes == sum(part.nbytes for part in parts)
    version = whole._version
    parts[2].add_(1)
    assert whole._version == version + 1  # autograd's check of in-place writes sees those to a part


OTHERS = {
    "no views": [torch.randn(size, COLUMNS) for size in (4, 6)],
    "no views, the first one empty": [torch.randn(size, COLUMNS) for size in (0, 4)],
    "in another order": list(rows().split(SIZES))[::-1],
    "with a gap": [part for number, part in enumerate(rows().split(SIZES)) if number != 2],
    "of two tensors": [rows().split((4, 7))[0], rows().split((4, 7))[1]],
    "of half rows": [(whole := rows())[:2, :4], whole[1:3, :4]],
    "one twice": [rows().split(SIZES)[0]] * 2,
    "by column": list(rows().split((3, 5), dim=1)),
    "of other widths": [(whole := rows())[:4], whole.view(-1)[4 * COLUMNS :].view(-1, COLUMNS // 2)],
    "of other dtypes": [(whole := rows())[:4], whole.view(torch.int32)[4:]],
    "flat": list(rows().view(-1).split([COLUMNS * size for size in SIZES])),
}


@pytest.mark.parametrize("parts", OTHERS.values(), ids=OTHERS)
def test_other_parts_leave_one_by_one(parts: list[torch.Tensor]) -> None:
    tensors, found = back(parts)
    assert tensors == len(parts)
    assert_same_bits(parts, found)


def test_absent_parts_leave_the_others_one_by_one() -> None:
    first, _, third, _ = rows().split(SIZES)
    tensors, found = back([first, None, third])
    assert tensors == 2
    assert_same_bits([first, None, third], found)
