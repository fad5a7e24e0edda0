"""Quantizers of current scaling in FP8, on a GPU: Transformer Engine's numbers and scales."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

from te_offload.fused.kernels.experts import Experts
from te_offload.ops.scaling import Scaling
from tests.support.mlp import seeded

tex = pytest.importorskip("transformer_engine_torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
pytest.importorskip("quack", reason="quack-kernels, which compiles the quantizers, is not installed here")
from te_offload.fused.kernels.fp8 import BLOCK, padded_tokens  # noqa: E402 (needs triton)
from te_offload.fused.kernels.fp8_current import CurrentQuantizers  # noqa: E402 (needs quack)

CODES = {torch.float8_e4m3fn: tex.DType.kFloat8E4M3, torch.float8_e5m2: tex.DType.kFloat8E5M2}
FORMATS = pytest.mark.parametrize("form", list(CODES), ids=["E4M3", "E5M2"])
# part of a tile; fewer tiles than come before numbers; those of a few weights in flight; more than the L2 cache holds
SHAPES = [(1, 16, 16), (3, 208, 272), (7, 1408, 2048), (2, 4096, 7168)]


def weights_of(count: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Each with another largest magnitude."""
    return [(seeded((rows, columns), seed, dtype=dtype) * 2.0 ** (seed - 3)).cuda() for seed in range(count)]


def assert_those_of_transformer_engine(
    weights: list[torch.Tensor], form: torch.dtype, *, power_of_two: bool = False, quantizers: CurrentQuantizers
) -> None:
    scaling = Scaling(form, power_of_two=power_of_two)
    found = quantizers.weights(Experts.of("weights", weights), scaling, by_column=True)
    rows = quantizers.weights(Experts.of("weights", weights), scaling, by_column=False)
    assert rows.columns is None and torch.equal(rows.inverses, found.inverses)
    theirs = Float8CurrentScalingQuantizer(CODES[form], device=weights[0].device, force_pow_2_scales=power_of_two)
    for expert, weight in enumerate(weights):
        expected = theirs(weight)
        numbers = expected._data.view(torch.uint8)
        assert torch.equal(found.inverses[expert], expected._scale_inv[0]), expert
        for one in (rows, found):
            assert torch.equal(one.rows.view[one.rows.table[expert]].view(torch.uint8), numbers), expert
        turned = found.columns.view[found.columns.table[expert]]
        assert torch.equal(turned.view(torch.uint8), numbers.t()), expert


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_and_scales_of_weights_are_those_of_transformer_engine(
    shape: tuple[int, int, int], dtype: torch.dtype, form: torch.dtype
) -> None:
    for power_of_two in (False, True):
        assert_those_of_transformer_engine(
            weights_of(*shape, dtype), form, power_of_two=power_of_two, quantizers=CurrentQuantizers()
        )


@FORMATS
@pytest.mark.parametrize("what", ["zero", "infinite", "not a number", "tiny", "huge"])
def test_weights_that_are_no_numbers_have_the_scales_of_transformer_engine(what: str, form: torch.dtype) -> None:
    weights = weights_of(3, 160, 144)
    if what in ("zero", "tiny", "huge"):
        weights[1] *= {"zero": 0.0, "tiny": 1e-38, "huge": 1e38}[what]
    else:
        weights[1][150, 5] = float("-inf" if what == "infinite" else "nan")
    assert_those_of_transformer_engine(weights, form, quantizers=CurrentQuantizers())


def test_a_captured_quantizer_reads_the_numbers_of_each_replay() -> None:
    quantizers, scaling = CurrentQuantizers(), Scaling(torch.float8_e4m3fn)
    weights = weights_of(5, 384, 512)
    experts = Experts.of("weights", weights)
    quantizers.weights(experts, scaling, by_column=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantizers.weights(experts, scaling, by_column=True)
    for factor in (1.0, -3.0, 0.01):
        for weight in weights:
            weight *= factor
        graph.replay()
        expected = quantizers.weights(experts, scaling, by_column=True)
        assert torch.equal(captured.inverses, expected.inverses)
        for one, other in ((captured.rows, expected.rows), (captured.columns, expected.columns)):
            assert torch.equal(one.view.view(torch.uint8), other.view.view(torch.uint8))


SPLITS = {
    "even": (256,) * 4,
    "ragged": (1301, 0, 1, 298),
    "empty at both ends": (0, 128, 129, 0),
    "one with more than are in flight": (40, 9000, 0, 24),
    "more experts than lanes": tuple(range(70)),
    "more experts than threads": (0,) * 40 + tuple(expert % 5 * 33 for expert in range(300)) + (0,) * 300 + (7,),
    "none": (0, 0),
}


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("splits", list(SPLITS.values()), ids=list(SPLITS))
def test_rows_of_each_expert_have_the_numbers_and_scale_of_transformer_engine(
    splits: tuple[int, ...], dtype: torch.dtype, form: torch.dtype
) -> None:
    used, tokens, columns = sum(splits), sum(splits) + 130, 272
    x = seeded((tokens, columns), 0, dtype=dtype).cuda()
    x[used:] = float("nan")  # of no expert
    offsets = torch.tensor([0, *itertools.accumulate(splits)], dtype=torch.int32, device="cuda")
    weights = torch.rand(len(splits), device="cuda") + 0.5
    quantizers = CurrentQuantizers()
    for power_of_two in (False, True):
        scaling = Scaling(form, power_of_two=power_of_two, epsilon=2.0**-20)
        found = quantizers.rows(x, offsets, scaling, weights=weights, by_column=True)
        alone = quantizers.rows(x, offsets, scaling, weights=weights, by_column=False)
        theirs = Float8CurrentScalingQuantizer(
            CODES[form], device=x.device, force_pow_2_scales=power_of_two, amax_epsilon=2.0**-20
        )
        assert alone.columns is None and torch.equal(alone.inverses, found.inverses)
        assert found.columns is not None and found.columns.shape == (columns, padded_tokens(tokens, len(splits)))
        turned, place = found.columns.view(torch.uint8), 0
        for expert, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            rows = x[begin:end]
            expected = theirs(rows if begin < end else torch.zeros_like(x[:16]))
            assert torch.equal(found.inverses[expert], expected._scale_inv[0]), expert
            if begin == end:
                continue
            numbers = expected._data.view(torch.uint8)
            for one in (alone, found):
                assert one.rows is not None and one.factors is not None
                assert torch.equal(one.rows[begin:end].view(torch.uint8), numbers), expert
                assert bool((one.factors[begin:end] == found.inverses[expert] * weights[expert]).all()), expert
                inverse = 1 / one.scales[begin:end].double()
                assert bool((inverse.float() == found.inverses[expert]).all()), expert
            assert torch.equal(turned[:, place : place + end - begin], numbers.t()), expert
            upto = place + -(-(end - begin) // BLOCK) * BLOCK
            assert not turned[:, place + end - begin : upto].any(), expert
            place = upto


@pytest.mark.parametrize("what", ["zero", "infinite", "not a number", "tiny", "huge"])
def test_rows_that_are_no_numbers_have_the_scales_of_transformer_engine(what: str) -> None:
    x = seeded((384, 144), 0, dtype=torch.bfloat16).cuda()
    if what in ("zero", "tiny", "huge"):
        x[128:] *= {"zero": 0.0, "tiny": 1e-38, "huge": 1e38}[what]
    else:
        x[300, 140] = float("-inf" if what == "infinite" else "nan")
    offsets, weights = torch.tensor([0, 128, 384], dtype=torch.int32, device="cuda"), torch.ones(2, device="cuda")
    found = CurrentQuantizers().rows(x, offsets, Scaling(torch.float8_e4m3fn), weights=weights, by_column=False)
    assert found.rows is not None
    theirs = Float8CurrentScalingQuantizer(CODES[torch.float8_e4m3fn], device=x.device)
    for expert, rows in enumerate((x[:128], x[128:])):
        expected = theirs(rows)
        assert torch.equal(found.inverses[expert], expected._scale_inv[0])
        mine = found.rows[:128] if expert == 0 else found.rows[128:]
        assert torch.equal(mine.view(torch.uint8), expected._data.view(torch.uint8))


def test_rows_that_begin_at_any_address_have_the_same_numbers() -> None:
    x = seeded((257, 256), 0, dtype=torch.bfloat16).cuda()
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    offsets, weights = torch.tensor([0, 257], dtype=torch.int32, device="cuda"), torch.ones(1, device="cuda")
    one, other = (
        CurrentQuantizers().rows(rows, offsets, Scaling(torch.float8_e4m3fn), weights=weights, by_column=False)
        for rows in (x, moved)
    )
    assert one.rows is not None and other.rows is not None
    assert torch.equal(one.rows.view(torch.uint8), other.rows.view(torch.uint8))


def test_calls_on_several_streams_at_once_give_the_bits_of_one_after_the_other() -> None:
    quantizers, scaling = CurrentQuantizers(), Scaling(torch.float8_e4m3fn)
    weights = [weights_of(6, 1024, 2048) for _ in range(4)]
    experts = [Experts.of("weights", one) for one in weights]
    expected = [quantizers.weights(one, scaling, by_column=True) for one in experts]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in experts]
    for _ in range(5):
        results = []
        for stream, one in zip(streams, experts, strict=True):
            with torch.cuda.stream(stream):
                results.append(quantizers.weights(one, scaling, by_column=True))
        torch.cuda.synchronize()
        for found, alone in zip(results, expected, strict=True):
            assert torch.equal(found.inverses, alone.inverses)
            assert torch.equal(found.columns.view.view(torch.uint8), alone.columns.view.view(torch.uint8))
