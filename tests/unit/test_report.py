"""The report says what the record says: on records made by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from te_offload import Fate, Outcome, Reason, Residency, SlotName, SlotRecord, StepRecord, Window
from te_offload.report.as_json import SCHEMA, step_as_dict
from te_offload.report.picture import draw
from te_offload.report.table import step_table

STEP = StepRecord(
    index=3,
    rank=1,
    slots=(
        SlotRecord(
            "layer0",
            "mlp.0",
            SlotName.FC1_INPUT,
            0,
            2 * 2**20,
            8,
            Fate.OFFLOADED,
            Reason.NONE,
            2 * 2**20,
            outcome=Outcome.LATE,
            out_ms=0.04,
            back_ms=0.05,
            exposed_ms=0.03,
            format="FP8 by column",
        ),
        SlotRecord(
            "layer0", "mlp.1", SlotName.ACT_INPUT, 0, 4 * 2**20, 1, Fate.KEPT, Reason.ASKED, 0, sizes=(4 * 2**20,)
        ),
        SlotRecord("layer0", "mlp.2", SlotName.FC2_INPUT, 0, 0, 0, Fate.RECOMPUTED, Reason.REBUILT, 0),
        SlotRecord("layer0", "", SlotName.OTHER, 0, 100, 2, Fate.KEPT, Reason.TOO_SMALL, 0),
    ),
    residency=(Residency("step begins", 0), Residency("layer0 saved", 6 * 2**20), Residency("copied out", 4 * 2**20)),
    windows=(Window("layer0", 0, 0.0, 1.0, 0.5, 2.0, 3.0, 0),),
    bytes_out=2 * 2**20,
    bytes_back=2 * 2**20,
    copies_out=1,
    copies_back=1,
    peak_in_flight=512,
    peak_ahead=1024,
    host_peak=2 * 2**20,
    host_held=3 * 2**20,
    host_allocations=2,
    host_node=None,
    host_nodes=(),
    host_failure=None,
    unseen=0,
    exempt_bytes=1024,
    abandoned=0,
    raised=False,
    planned=True,
    predicted_ms=None,
    predicted_waiting_ms=None,
    timed=True,
    throttled_at_end_ms=0.0,
    step_ms=6.5,
    out_ms=0.04,
    back_ms=0.05,
)


def test_table_has_a_row_a_slot_with_fate_and_reason() -> None:
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in step_table(STEP, width=160).splitlines()
        if "│" in line
    ]
    assert lines == [
        ["layer0/mlp.0.fc1_input", "0", "2.0 MiB", "8", "offloaded", "FP8 by column", "0.04", "0.05", "late, 0.03 ms"],
        ["layer0/mlp.1.act_input", "0", "4.0 MiB", "1", "kept: asked by the user", "", "", "", ""],
        ["layer0/mlp.2.fc2_input", "0", "0 B", "0", "recomputed: the backward rebuilds it", "", "", "", ""],
        ["layer0/other", "0", "100 B", "2", "kept: too small", "", "", "", ""],
    ]


def test_totals_are_below_the_table() -> None:
    text = step_table(STEP)
    assert "2.0 MiB out in 1 copies at 52.4 GB/s" in text
    assert "At most 6.0 MiB of saved tensors on the device" in text
    assert "2.0 MiB on the host (of 3.0 MiB held after 2 allocations)" in text
    assert "1.0 KiB of weights and metadata never moved" in text
    assert "6.50 ms, of these 0.50 waiting for copies out and 0.03 for copies back, chosen by a plan; rank 1." in text
    assert "Out: 2.0 MiB FP8 by column." in text
    refused = dataclasses.replace(STEP, host_failure="CUDA error 2 while page-locking 1.0 GiB")
    assert "The system refused host memory: CUDA error 2" in step_table(refused)


def test_narrow_table_loses_no_word() -> None:
    text = step_table(STEP, width=80)
    assert "asked" in text and "user" in text and "…" not in text


def test_json_has_a_schema_and_survives_a_round_trip() -> None:
    values = json.loads(json.dumps(step_as_dict(STEP)))
    assert SCHEMA.split(".")[0] == "2"
    assert values["peak_resident"] == 6 * 2**20
    assert values["slots"][1] == {
        "name": "layer0/mlp.1.act_input",
        "layer": "layer0",
        "op": "mlp.1",
        "slot": "act_input",
        "forward": 0,
        "nbytes": 4 * 2**20,
        "tensors": 1,
        "fate": "kept",
        "reason": "asked by the user",
        "bytes_out": 0,
        "outcome": "",
        "out_ms": None,
        "back_ms": None,
        "exposed_ms": 0.0,
        "format": "",
        "sizes": [4 * 2**20],
        "shared": 0,
        "part_of": "",
        "out_gbs": None,
        "back_gbs": None,
    }
    assert values["bytes_by_format"] == {"FP8 by column": 2 * 2**20}
    assert values["windows"][0]["backward_ms"] == 3.0 and values["throttled_ms"] == 0.5


def test_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "report.png"
    draw(path, [3.0, 2.0, 1.5], STEP, STEP)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000
