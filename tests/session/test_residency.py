"""Bytes of saved tensors on the device over a step, as the record counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_offload import OffloadSession
from te_offload.offload.record import BACKWARD_BEGINS
from tests.session.test_lifetime import SPLITS, Stack
from tests.support.mlp import make_inputs, make_mlp, run

SLOTS = ["fc1_input", "act_input", "fc2_input"]


@pytest.mark.parametrize("keep", [SLOTS, []], ids=["kept", "offloaded"])
def test_graph_that_outlives_its_step_counts_in_no_later_one(keep: list[str]) -> None:
    module = make_mlp(keep=keep)
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session:
        with session.step():
            y = module(x, sizes, scales, sizes)
        with session.step():
            run(module, SPLITS)
            del y
        with session.step():
            run(module, SPLITS)
        _, second, third = session.records
    assert (second.bytes_out > 0) is (not keep)
    assert [(moment.label, moment.nbytes) for moment in second.residency] == [
        (moment.label, moment.nbytes) for moment in third.residency
    ]
    assert min(moment.nbytes for moment in third.residency) == third.residency[-1].nbytes == 0
    assert third.peak_resident > 0


def test_each_forward_s_end_is_a_moment_with_what_is_saved_by_then() -> None:
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes="1GiB") as session, session.step():
        run(model, SPLITS)
    record = session.records[-1]
    layer = sum(row.nbytes for row in record.slots if row.layer == "layer0")
    saved = [(moment.label, moment.nbytes) for moment in record.residency if moment.label.endswith(" saved")]
    assert saved == [(f"layer{number} saved", (number + 1) * layer) for number in range(3)]


def test_backward_s_begin_is_one_moment_behind_all_forwards_and_before_anything_is_read() -> None:
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session, session.step():
        run(model, SPLITS)
    labels = [moment.label for moment in session.records[-1].residency]
    begins = labels.index(BACKWARD_BEGINS)
    assert labels.count(BACKWARD_BEGINS) == 1
    assert max(place for place, label in enumerate(labels) if label.endswith(" saved")) < begins
    assert begins < labels.index("coming back")
    assert session.records[-1].bytes_back > 0


def test_forward_that_raised_has_no_rows_and_no_bytes() -> None:
    model = Stack(2)

    def fails(*_: Any) -> None:
        raise RuntimeError("injected")

    inner = model.layers[1]
    inner.forward = lambda x, *rest: fails(torch.nn.functional.relu(x) * x.exp())
    with OffloadSession(model.layers, min_bytes=0) as session:
        with pytest.raises(RuntimeError, match="injected"), session.step():
            run(model, SPLITS)
        (record,) = session.records
    assert record.raised
    assert {row.layer for row in record.slots} == {"layer0"}
    assert record.bytes_out == sum(row.bytes_out for row in record.slots if row.layer == "layer0") > 0


@pytest.mark.parametrize("keep", [[], SLOTS], ids=["offloaded", "kept"])
def test_exempt_bytes_are_those_of_split_sizes_and_router_scales(keep: list[str]) -> None:
    module = make_mlp(keep=keep)
    x, sizes, scales = make_inputs(SPLITS)
    with OffloadSession(module, min_bytes=0) as session, session.step():
        module(x, sizes, scales, sizes).sum().backward()
    record = session.records[-1]
    assert record.exempt_bytes == 2 * sizes.nbytes + scales.nbytes  # both linears have saved the sizes
    assert (record.bytes_out == 0) is bool(keep)
