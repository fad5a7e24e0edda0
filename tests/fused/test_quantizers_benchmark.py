"""The benchmark of quantizers: ways whose bits differ are refused, and experts without rows are in none of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("quack", reason="quack-kernels, which the quantizers need, is not installed here")

from benchmarks import quantizers
from benchmarks.quantizers import OURS, THEIRS, TWICE, Numbers, Way, check
from te_offload.fused.kernels.fp8_interface import QuantizedRows


def way(*numbers: float) -> Way:
    """Of one expert."""
    found: Numbers = [torch.tensor(numbers[:1]), torch.tensor(numbers[1:])]
    return Way(lambda: found, lambda value: value)


def test_ways_of_the_same_bits_may_be_compared() -> None:
    check({OURS: way(0.5, 1.0, 2.0), TWICE: way(0.5, 1.0, 2.0), THEIRS: way(0.5, 1.0, 2.0)})


@pytest.mark.parametrize(("other", "named"), [(way(0.25, 1.0), "inverse scales"), (way(0.5, 2.0), "numbers of part 0")])
def test_ways_whose_bits_differ_are_refused_by_name(other: Way, named: str) -> None:
    with pytest.raises(RuntimeError, match=f"{named} differ between 'one reading' and 'Transformer Engine'"):
        check({OURS: way(0.5, 1.0), TWICE: way(0.5, 1.0), THEIRS: other})


def test_experts_without_rows_are_in_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []

    def theirs(found: list[torch.Tensor], *, both: bool) -> Way:
        parts.extend(part.shape[0] for part in found)
        return way(float(both))

    monkeypatch.setattr(quantizers, "theirs", theirs)
    ways = quantizers.row_ways(torch.zeros(7, 16), [3, 0, 4], both=True)
    assert parts == [3, 4] and list(ways) == [OURS, TWICE, THEIRS]
    rows = QuantizedRows(torch.zeros(7, 16, dtype=torch.uint8), None, torch.zeros(7), torch.arange(3.0), None)
    inverses, *numbers = ways[OURS].numbers(rows)
    assert inverses.tolist() == [0.0, 2.0] and [one.shape[0] for one in numbers] == [3, 4]
