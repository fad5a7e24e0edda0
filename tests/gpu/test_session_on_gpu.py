"""Offloading on a GPU: bits, bytes, memory, and Transformer Engine's own context."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.pytorch import cpu_offload as te_cpu_offload

from te_offload import Fate, OffloadSession, Reason, SlotName, ops
from tests.gpu.paths import (
    EXPERTS,
    FFN,
    FORMATS,
    HIDDEN,
    PATHS,
    SPLITS,
    Stack,
    autocast,
    came_back_or_never_left,
    choose_path,
    mlp,
    slot_bytes,
    step,
)
from tests.support.mlp import assert_same_bits, gradients, make_inputs

pytestmark = pytest.mark.gpu


def is_about(found: int, by_hand: int, tensors: int) -> bool:
    """Whether bytes copied are those computed by hand, and less than 512 more for each tensor that lies beside another."""
    return by_hand <= found < by_hand + 512 * tensors + 1


@PATHS
@FORMATS
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_offloading_changes_no_bit_and_moves_the_bytes_computed_by_hand(
    monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool, splits: tuple[int, ...]
) -> None:
    choose_path(monkeypatch, path, fp8)
    expected = step(Stack(3), splits, fp8)
    assert_same_bits(expected, step(Stack(3), splits, fp8))  # else a difference below would mean nothing
    model = Stack(3)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0, verify=True) as session:
        for _ in range(3):
            with session.step():
                found = step(model, splits, fp8)
            assert_same_bits(expected, found)
    record = session.records[-1]
    by_hand = slot_bytes(sum(splits), fp8)
    for row in record.slots:
        assert row.fate is Fate.OFFLOADED
        assert row.nbytes == by_hand[row.slot.value], row.name
    assert is_about(record.bytes_out, 3 * sum(by_hand.values()), sum(row.tensors for row in record.slots))
    assert came_back_or_never_left(record)
    assert session.host_bytes == 0


@PATHS
@FORMATS
def test_deterministic_mode_keeps_the_bits_while_other_work_fills_the_gpu(
    monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool
) -> None:
    """Torch fills new memory with NaN there, and what fills it comes late on a busy GPU."""
    choose_path(monkeypatch, path, fp8)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    splits = SPLITS["even"]
    expected = step(Stack(3), splits, fp8)
    model = Stack(3)
    others, busy = torch.cuda.Stream(), torch.ones(1 << 29, device="cuda")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session:
            for _ in range(3):
                with torch.cuda.stream(others):
                    for _ in range(50):
                        busy.sin_()
                with session.step():
                    found = step(model, splits, fp8)
                assert_same_bits(expected, found)
    finally:
        torch.use_deterministic_algorithms(before)
    assert came_back_or_never_left(session.records[-1])


@PATHS
@FORMATS
@pytest.mark.parametrize("keep", ["fc1_input", "act_input", "fc2_input"])
def test_kept_slot_stays_and_the_others_go(monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool, keep: str) -> None:
    choose_path(monkeypatch, path, fp8)
    splits = SPLITS["ragged"]
    expected = step(mlp(), splits, fp8)
    model = mlp(keep=[keep])
    with OffloadSession(model, min_bytes=0) as session, session.step():
        assert_same_bits(expected, step(model, splits, fp8))
    by_hand = slot_bytes(sum(splits), fp8)
    for row in session.records[-1].slots:
        kept = row.slot.value == keep
        assert (row.fate, row.reason) == ((Fate.KEPT, Reason.ASKED) if kept else (Fate.OFFLOADED, Reason.NONE))
    record = session.records[-1]
    assert is_about(record.bytes_out, sum(by_hand.values()) - by_hand[keep], sum(row.tensors for row in record.slots))


@PATHS
@FORMATS
def test_weights_and_their_quantized_copies_are_never_copied(
    monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool
) -> None:
    choose_path(monkeypatch, path, fp8)
    model = mlp()
    with OffloadSession(model, min_bytes=0) as session, session.step():
        step(model, SPLITS["even"], fp8)
    record = session.records[-1]
    saved = sum(row.nbytes for row in record.slots)
    assert saved > 0 and is_about(record.bytes_out, saved, sum(row.tensors for row in record.slots))
    assert all(row.op for row in record.slots)
    copies_of_weights = 2 * EXPERTS * HIDDEN * FFN if fp8 else 0
    assert record.exempt_bytes >= copies_of_weights
    assert fp8 or record.exempt_bytes < 2 * EXPERTS * HIDDEN * FFN  # bf16 weights are parameters, saved as they are


@PATHS
@FORMATS
def test_peak_memory_falls_by_the_planned_bytes_less_those_in_flight(
    monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool
) -> None:
    choose_path(monkeypatch, path, fp8)
    sizes = {"experts": 8, "hidden": 1024, "ffn": 2048}
    splits = (1024, 3072, 2048, 0, 4096, 2048, 1024, 3072)
    layers = 12  # so that what a layer needs beside its slots, which offloading does not change, is within the 5%

    def peak(enabled: bool | None) -> tuple[int, Any]:
        model = Stack(layers, **sizes)
        x, counts, scales = make_inputs(splits, 1024, device="cuda", dtype=torch.bfloat16)
        dy = torch.ones_like(x)
        session = None if enabled is None else OffloadSession(model.layers, max_in_flight="64MiB", enabled=enabled)

        def one() -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            with autocast(fp8):
                model(x * 1, counts, scales, counts).backward(dy)  # x itself would stay on the device, being ours

        for _ in range(2):
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            if session is None:
                one()
            else:
                with session.step():
                    one()
            torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - before
        if session is not None:
            session.close()
        return found, session.records[-1] if session is not None else None

    without, _ = peak(None)
    _, recorded = peak(False)
    offloaded, record = peak(True)
    planned = layers * sum(slot_bytes(sum(splits), fp8, 1024, 2048).values())
    assert recorded.peak_resident == planned
    assert is_about(record.bytes_out, planned, sum(row.tensors for row in record.slots))
    expected = planned - record.peak_resident  # what the record says was resident or in flight at the worst moment
    assert expected > planned / 2
    # Within 5%: offloaded, the worst moment is one layer lower, where a gradient of the hidden width is alive too.
    assert without - offloaded == pytest.approx(expected, abs=0.05 * planned)


@PATHS
@FORMATS
@pytest.mark.parametrize(
    "mode", ["main-grad", "delayed-wgrad", "checkpoint", "one-grouped-weight", "side-stream", "frozen-fc1"]
)
def test_modes_change_no_bit(monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool, mode: str) -> None:
    choose_path(monkeypatch, path, fp8)
    if mode == "one-grouped-weight" and path == "split":
        pytest.skip("Transformer Engine has single_grouped_weight on the grouped path alone")
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    arguments: dict[str, Any] = {
        "main-grad": {"accumulate_into_main_grad": True},
        "delayed-wgrad": {"delay_wgrad_compute": True},
        "one-grouped-weight": {"single_grouped_weight": True},
    }.get(mode, {})

    def call(model: Stack) -> dict[str, torch.Tensor]:
        x, sizes, scales = make_inputs(SPLITS["empty-expert"], HIDDEN, device="cuda", dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(mode != "frozen-fc1" or ".0.weight" not in name)
            if mode == "main-grad":
                parameter.main_grad = torch.zeros(parameter.shape, device="cuda")  # type: ignore[attr-defined]
        with autocast(fp8):
            if mode == "checkpoint":

                def recipe() -> Any:
                    return autocast(fp8), autocast(fp8)

                y = checkpoint(model.layers[0], x, sizes, scales, sizes, use_reentrant=False, context_fn=recipe)
                y = model.layers[1](y, sizes, scales, sizes)
            else:
                y = model(x, sizes, scales, sizes)
        y.float().square().sum().backward()
        if mode == "delayed-wgrad":
            for part in model.modules():
                if isinstance(part, te.ops.GroupedLinear):
                    part.backward_dw()
        found = gradients(model, x, scales)
        if mode == "main-grad":
            found |= {f"main {name}": p.main_grad.clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        return {
            name: grad
            for name, grad in found.items()
            if not (mode == "main-grad" and "layers" in name and "main" not in name)
        }

    expected = call(Stack(2, **arguments))
    model = Stack(2, **arguments)
    stream = torch.cuda.Stream() if mode == "side-stream" else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), OffloadSession(model.layers, min_bytes=0) as session, session.step():
        found = call(model)
    torch.cuda.synchronize()
    assert_same_bits(expected, found)
    assert session.records[-1].bytes_out > 0


@PATHS
@FORMATS
@pytest.mark.parametrize(
    "keep", [(), ("act_input",), ("fc1_input", "act_input", "fc2_input")], ids=["none", "act", "all"]
)
def test_marks_hold_in_transformer_engines_own_context(
    monkeypatch: pytest.MonkeyPatch, path: str, fp8: bool, keep: tuple[str, ...]
) -> None:
    choose_path(monkeypatch, path, fp8)
    tokens, sizes = 8192, {"experts": 4, "hidden": 1024, "ffn": 2048}
    splits = (2048, 3072, 1024, 2048)
    model = Stack(3, keep=keep, **sizes)
    context, sync = te.get_cpu_offload_context(
        enabled=True, num_layers=1, model_layers=3, offload_activations=True, offload_weights=False
    )
    x, counts, scales = make_inputs(splits, 1024, device="cuda", dtype=torch.bfloat16)
    y = x * 1
    for layer in model.layers:
        with context, autocast(fp8):
            synchronizer = te_cpu_offload.OFFLOAD_SYNCHRONIZER
            y = layer(y, counts, scales, counts)
        y = sync(y)
    offloaded = synchronizer.get_offloaded_total_size_mb() * 2**20
    y.sum().backward()
    by_hand = slot_bytes(tokens, fp8, 1024, 2048)
    planned = sum(size for name, size in by_hand.items() if name not in keep)
    assert offloaded == pytest.approx(planned, abs=2048)  # it leaves scales, which are small tensors, where they are


@PATHS
def test_window_mixed_with_plain_te_ops_keeps_what_its_own_op_says(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    choose_path(monkeypatch, path, fp8=False)
    size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}

    def mixed(activation: Any) -> te.ops.Sequential:
        torch.manual_seed(0)
        first = te.ops.GroupedLinear(EXPERTS, HIDDEN, FFN, **size)
        return te.ops.Sequential(first, activation, te.ops.GroupedLinear(EXPERTS, FFN, HIDDEN, **size))

    expected = step(mixed(te.ops.ScaledSReLU()), SPLITS["ragged"], False)
    model = mixed(ops.ScaledSReLU(no_offload_activation=True))
    with OffloadSession(model, min_bytes=0) as session, session.step():
        assert_same_bits(expected, step(model, SPLITS["ragged"], False))
    rows = session.records[-1].slots
    assert [(row.slot, row.reason) for row in rows if row.op] == [(SlotName.ACT_INPUT, Reason.ASKED)]
    gone = [row.nbytes for row in rows if row.fate is Fate.OFFLOADED]
    by_hand = slot_bytes(512, False)
    assert sum(gone) >= by_hand["fc1_input"] + by_hand["fc2_input"]


def test_plain_te_ops_in_the_same_context_offload_their_weight_copies() -> None:
    """What the marks are for: without them FP8 weight copies leave with the activations."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    layers = [
        te.ops.Sequential(
            te.ops.GroupedLinear(4, 1024, 2048, **size),
            te.ops.ScaledSReLU(),
            te.ops.GroupedLinear(4, 2048, 1024, **size),
        )
        for _ in range(3)
    ]
    context, sync = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3, offload_weights=False)
    x, counts, scales = make_inputs((2048, 3072, 1024, 2048), 1024, device="cuda", dtype=torch.bfloat16)
    y = x * 1
    for layer in layers:
        with context, autocast(True):
            synchronizer = te_cpu_offload.OFFLOAD_SYNCHRONIZER
            y = layer(y, counts, scales, counts)
        y = sync(y)
    offloaded = synchronizer.get_offloaded_total_size_mb() * 2**20
    y.backward(torch.ones_like(y))  # not y.sum(): its gradient is not contiguous, see the test below
    by_hand = slot_bytes(8192, True, 1024, 2048)
    assert offloaded >= sum(by_hand.values()) + 2 * 4 * 1024 * 2048 - 4096


def test_views_and_aliases_come_back_on_the_gpu() -> None:
    from tests.session.test_bits import Layer

    def make() -> list[torch.Tensor]:
        base = torch.arange(100_000, dtype=torch.float32, device="cuda")
        return [base[:60_000], base[40_000:], base.view(100, 1000).t()[7:, ::3]]

    layer = Layer(make).cuda()
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
    for found, expected in zip(layer.seen[0], make(), strict=True):
        assert found.device.type == "cuda" and found.stride() == expected.stride()
        assert torch.equal(found, expected)
    assert session.records[-1].bytes_out == 400_000
    assert len({tensor.untyped_storage().data_ptr() for tensor in layer.seen[0]}) == 1


def test_cpu_tensors_saved_in_a_gpu_layer_stay_where_they_are() -> None:
    from tests.session.test_bits import Layer

    layer = Layer(lambda: [torch.ones(1000), torch.ones(1000, device="cuda")]).cuda()
    with OffloadSession(layer, min_bytes=0) as session, session.step():
        layer(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
    assert [tensor.device.type for tensor in layer.seen[0]] == ["cpu", "cuda"]
    reasons = {row.reason: row.nbytes for row in session.records[-1].slots}
    assert reasons == {Reason.OTHER_DEVICE: 4000, Reason.NONE: 4000}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [40])
def test_many_steps_with_changing_splits_change_no_bit(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    choose_path(monkeypatch, "split", False)
    generator = torch.Generator().manual_seed(0)
    expected_model, model = Stack(4), Stack(4)
    with OffloadSession(model.layers, min_bytes=0, max_in_flight=0) as session:
        for seed in range(steps):
            tokens = 1024 if seed == 0 else int(torch.randint(16, 1025, (), generator=generator))
            cuts = torch.randint(0, tokens + 1, (EXPERTS - 1,), generator=generator).sort().values.tolist()
            splits = tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))
            expected = step(expected_model, splits, False, seed=seed)
            with session.step():
                found = step(model, splits, False, seed=seed)
            assert_same_bits(expected, found)
            record = session.records[-1]
            assert record.bytes_out == 4 * sum(slot_bytes(tokens, False).values())
            assert came_back_or_never_left(record)
            if seed == 0:
                first, peak = record, record.host_peak
        assert record.host_allocations == first.host_allocations, "pinned memory was taken after the first step"
        assert record.host_held <= 1.05 * peak


def test_slot_names_are_the_same_on_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for path in ("split", "grouped"):
        with pytest.MonkeyPatch.context() as patch:
            choose_path(patch, path, fp8=False)
            model = mlp()
            with OffloadSession(model, min_bytes=0) as session, session.step():
                step(model, SPLITS["even"], False)
            names.append([(row.name, row.nbytes) for row in session.records[-1].slots])
    assert names[0] == names[1]
    assert [SlotName(name.rsplit(".")[-1]) for name, _ in names[0]] == [
        SlotName.FC1_INPUT,
        SlotName.ACT_INPUT,
        SlotName.FC2_INPUT,
    ]
