"""The quantizer of weights in FP8 with a scale a tensor, on a GPU: Transformer Engine's numbers and scales."""

from __future__ import annotations

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
from te_offload.fused.kernels.fp8_weights import ScaledWeightQuantizers  # noqa: E402 (needs quack)

CODES = {torch.float8_e4m3fn: tex.DType.kFloat8E4M3, torch.float8_e5m2: tex.DType.kFloat8E5M2}
FORMATS = pytest.mark.parametrize("form", list(CODES), ids=["E4M3", "E5M2"])
# part of a tile; fewer tiles than come before numbers; those of a few weights in flight; more than the L2 cache holds
SHAPES = [(1, 16, 16), (3, 208, 272), (7, 1408, 2048), (2, 4096, 7168)]


def weights_of(count: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Each with another largest magnitude."""
    return [(seeded((rows, columns), seed, dtype=dtype) * 2.0 ** (seed - 3)).cuda() for seed in range(count)]


def assert_those_of_transformer_engine(
    weights: list[torch.Tensor], form: torch.dtype, *, power_of_two: bool = False, quantizers: ScaledWeightQuantizers
) -> None:
    scaling = Scaling(form, power_of_two=power_of_two)
    found = quantizers.quantize(Experts.of("weights", weights), scaling, by_column=True)
    rows = quantizers.quantize(Experts.of("weights", weights), scaling, by_column=False)
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
def test_numbers_and_scales_are_those_of_transformer_engine(
    shape: tuple[int, int, int], dtype: torch.dtype, form: torch.dtype
) -> None:
    for power_of_two in (False, True):
        assert_those_of_transformer_engine(
            weights_of(*shape, dtype), form, power_of_two=power_of_two, quantizers=ScaledWeightQuantizers()
        )


@FORMATS
@pytest.mark.parametrize("what", ["zero", "infinite", "not a number", "tiny", "huge"])
def test_numbers_that_are_none_have_the_scales_of_transformer_engine(what: str, form: torch.dtype) -> None:
    weights = weights_of(3, 160, 144)
    if what in ("zero", "tiny", "huge"):
        weights[1] *= {"zero": 0.0, "tiny": 1e-38, "huge": 1e38}[what]
    else:
        weights[1][150, 5] = float("-inf" if what == "infinite" else "nan")
    assert_those_of_transformer_engine(weights, form, quantizers=ScaledWeightQuantizers())


def test_a_captured_quantizer_reads_the_weights_of_each_replay() -> None:
    quantizers, scaling = ScaledWeightQuantizers(), Scaling(torch.float8_e4m3fn)
    weights = weights_of(5, 384, 512)
    experts = Experts.of("weights", weights)
    quantizers.quantize(experts, scaling, by_column=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantizers.quantize(experts, scaling, by_column=True)
    for factor in (1.0, -3.0, 0.01):
        for weight in weights:
            weight *= factor
        graph.replay()
        expected = quantizers.quantize(experts, scaling, by_column=True)
        assert torch.equal(captured.inverses, expected.inverses)
        for one, other in ((captured.rows, expected.rows), (captured.columns, expected.columns)):
            assert torch.equal(one.view.view(torch.uint8), other.view.view(torch.uint8))


def test_calls_on_several_streams_at_once_do_not_wait_for_each_other() -> None:
    quantizers, scaling = ScaledWeightQuantizers(), Scaling(torch.float8_e4m3fn)
    weights = [weights_of(6, 1024, 2048) for _ in range(4)]
    experts = [Experts.of("weights", one) for one in weights]
    expected = [quantizers.quantize(one, scaling, by_column=True) for one in experts]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in experts]
    for _ in range(5):
        results = []
        for stream, one in zip(streams, experts, strict=True):
            with torch.cuda.stream(stream):
                results.append(quantizers.quantize(one, scaling, by_column=True))
        torch.cuda.synchronize()
        for found, alone in zip(results, expected, strict=True):
            assert torch.equal(found.inverses, alone.inverses)
            assert torch.equal(found.columns.view.view(torch.uint8), alone.columns.view.view(torch.uint8))
