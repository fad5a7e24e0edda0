"""The benchmark of bytes from memory: what it makes of ncu's output, and what it says without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import traffic

OURS = "kernel_cutlass_kernel_te_offloadfusedkernelssm90_deviceDgradGemm_object_at__TiledMMA_ThrLayoutVMNK_0"
FC1 = "kernel_cutlass_kernel_te_offloadfusedkernelssm90_deviceSReLUGemmBF16_object_at__TiledMMA_0"
SUMS = "kernel_cutlass_kernel_te_offloadfusedkernelsrows_deviceRowSums_object_at__tensorptrf32_0"
THEIRS = "void transformer_engine::<unnamed>::scaled_unary_forward_kernel<16, __nv_bfloat16>(float)"


def csv_of(*rows: tuple[str, ...]) -> list[str]:
    head = ["ID", "Kernel Name", *traffic.METRICS.values()]
    lines = [
        head,
        ["", "", "ns", "byte", "byte", "byte", "cycle", "%", "%"],
        *([str(n), *row] for n, row in enumerate(rows)),
    ]
    return ["==PROF== Connected\n", *(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines)]


def test_launches_are_read_in_order_without_messages_units_and_commas_in_numbers() -> None:
    first = OURS, "433,536", "925,012,345.00", "151", "2,538", "754,352.6", "73.9", "61.2"
    found = traffic.parsed(csv_of(first, (SUMS, "3,712", "1", "2", "3", "4", "5", "6")))
    assert found == [(OURS, 433536, 925012345, 151, 2538, 754353, 74, 61), (SUMS, 3712, 1, 2, 3, 4, 5, 6)]


def test_output_that_counts_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no launch"):
        traffic.parsed(["==ERROR== ERR_NVGPUCTRPERM\n"])


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (OURS, "te_offload: FC1's dgrad"),
        (FC1, "te_offload: FC1"),
        (SUMS, "te_offload: RowSums"),
        ("kernel_cutlass_kernel_quackgemm_default_epiGemmDefaultSm90_object_at", "QuACK: a GEMM"),
        (THEIRS, "transformer_engine::scaled_unary_forward_kernel"),
        (
            "nvjet_sm90_tst_128x256_64x4_1x2_h_bx_coopA_ptrGroup_TNN",
            "nvjet_sm90_tst_128x256_64x4_1x2_h_bx_coopA_ptrGroup_TNN",
        ),
    ],
)
def test_kernels_go_by_their_products_name(kernel: str, name: str) -> None:
    assert traffic.short_name(kernel) == name


def test_operands_are_counted_once_beside_what_was_read() -> None:
    operands = traffic.must_read(64, 2048, 1408, 32768)
    assert operands["FC1"] == 2 * (32768 * 2048 + 64 * 2048 * 1408)
    assert operands["FC2's wgrad"] == 2 * 32768 * (2048 + 1408)
    one = traffic.Traffic(OURS, 433536, 925_000_000, 151_000_000, 0, cycles=754353, memory=74, l2=61)
    rows = traffic.table([one], operands).splitlines()
    assert rows[2] == "| te_offload: FC1's dgrad | 433.5 | 925 | 461 | 151 | 0 | 1.74 | 74 | 61 |"
    assert len(traffic.table([traffic.Traffic(SUMS, 3712, *range(6))], operands).splitlines()) == 2


def test_without_ncu_it_says_where_that_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="CUDA's toolkit"):
        traffic.measure(traffic.SHAPE)


@pytest.mark.parametrize("status", [0, 7])
def test_when_ncu_fails_or_counts_nothing_what_it_printed_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    tool = tmp_path / "ncu"
    tool.write_text(f"#!{sys.executable}\nimport sys\nprint('not permitted', file=sys.stderr)\nsys.exit({status})\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=rf"status {status}\)\.\nnot permitted"):
        traffic.measure(traffic.SHAPE)
