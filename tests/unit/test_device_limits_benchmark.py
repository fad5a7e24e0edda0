"""What `benchmarks.device_limits` runs and says, without a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.device_limits import WARM_UP, Way, least_card, table, table_of_cards, ways_of

GIB = 2**30


def row(name: str, ms: float, gib: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "limit": None,
        "ms": [ms - 1, ms, ms + 2],
        "peak_bytes": int(gib * GIB),
        "reserved_bytes": int((gib + 0.5) * GIB),
        "bytes_out": None,
        "retries": [0] * (WARM_UP + 3),
    } | more


def test_ways_are_limits_between_two_peaks_and_every_number_of_layers_that_the_peer_takes() -> None:
    limit, *theirs, again = ways_of([0.25], 4, 10 * GIB, 6 * GIB)
    assert limit == Way("device_limit at 25% of the way", session=True, limit=9 * GIB)
    assert [(way.session, way.layers) for way in theirs] == [(False, 1), (False, 2), (False, 3)]
    assert again == Way("no offloading, again")


def test_table_names_for_each_limit_the_quickest_of_the_peers_that_meet_it() -> None:
    rows = [
        row("device_limit", 10.0, 8.5, limit=9 * GIB, bytes_out=3 << 20, peak_in="layer1, backward", waiting_ms=0.5,
            predicted_ms=9.5, predicted_bytes=8 * GIB),
        row("Transformer Engine's context, 1 of 4 layers", 11.0, 9.5),
        row("Transformer Engine's context, 2 of 4 layers", 14.0, 8.75),
        row("Transformer Engine's context, 3 of 4 layers", 12.0, 8.5),
    ]  # fmt: skip
    text = table(rows)
    assert "| device_limit | 9.00 | 9.5 | 10.0 (9.0, 12.0) | 8.00 | 8.50 | 9.00 | 3 | 0.5 |" in text
    assert (
        "ours 10.0 ms (peak in layer1, backward); of theirs Transformer Engine's context, 3 of 4 layers, 12.0" in text
    )
    assert "of theirs none does" in table(rows[:2])


def test_least_card_is_the_smallest_on_which_a_way_runs_with_its_row_there() -> None:
    tried: list[int] = []

    def row_on(nbytes: int) -> dict[str, Any] | None:
        tried.append(nbytes)
        return None if nbytes < 8.75 * GIB else row("limit", 10.0 + len(tried), nbytes / GIB)

    found, there = least_card(row_on, row("limit", 10.0, 8.5, reserved_bytes=10 * GIB))
    assert found == 8.75 * GIB and there["peak_bytes"] == found and 1 < len(tried) < 5
    roomy = row("limit", 10.0, 8.5, reserved_bytes=10 * GIB)
    assert least_card(lambda nbytes: None, roomy) == (10 * GIB, roomy)  # that much it had


def test_table_of_cards_counts_retries_after_the_warm_up_by_the_step() -> None:
    there = row("limit", 12.0, 8.5, retries=[5] + [0] * (WARM_UP - 1) + [1, 2, 3])
    least = {"name": "limit", "card_bytes": 9 * GIB, "row": there}
    text = table_of_cards([least], [row("limit", 10.0, 8.5, limit=9 * GIB, reserved_bytes=10 * GIB)])
    assert "| limit | 9.00 | 8.50 | 10.00 | 9.00 | 12.0 (11.0, 14.0) | 2.0 | 11 |" in text
