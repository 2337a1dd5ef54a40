"""The datasheets' figures and their sources."""

from __future__ import annotations

import pytest

from trainwright.estimator.devices import DEVICE_TYPES, number_of, other_board, recognise
from trainwright.estimator.predict.datasheet import FAMILIES, reached

PROMISED = (
    "nvidia-m40-12gb",
    "nvidia-p100-16gb",
    "nvidia-v100-16gb",
    "nvidia-v100-32gb",
    "nvidia-t4",
    "nvidia-a10",
    "nvidia-a100-40gb",
    "nvidia-a100-80gb",
    "nvidia-l4",
    "nvidia-l40s",
    "nvidia-rtx3090",
    "nvidia-rtx4090",
    "nvidia-h100-80gb",
    "nvidia-h200",
    "nvidia-b200",
    "amd-mi300x",
    "cpu",
)


@pytest.mark.parametrize("name", PROMISED)
def test_each_device_type_has_each_figure_with_its_source(name: str) -> None:
    device = DEVICE_TYPES[name]
    assert {"fp64", "fp32", "bf16"} <= set(device.peak_flops)
    figures = {f"peak_flops.{dtype}" for dtype in device.peak_flops}
    figures |= {"bandwidth_bytes_per_s", "memory_bytes", "idle_w", "load_w"}
    figures |= {"link_bytes_per_s"} if name != "cpu" else set()
    assert set(device.sources) == figures
    assert all(
        text.startswith(("http", "assumed", "its ", "half of", "1/", "PCIe"))
        for text in device.sources.values()
    )
    if name != "cpu":
        assert device.source.startswith("https://")
        assert device.memory_bytes is not None
    assert 0 < device.idle_w < device.load_w


@pytest.mark.parametrize("name", PROMISED)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64"])
def test_reached_rates_are_below_the_peak(name: str, dtype: str) -> None:
    device = DEVICE_TYPES[name]
    for family in FAMILIES:
        roofline = reached(device, family, dtype)
        assert 0 < roofline.flops_per_s < max(device.peak_flops.values())
        assert 0 < roofline.bytes_per_s < device.bandwidth_bytes_per_s
        assert roofline.latency_s > 0


def test_the_arithmetic_rate_depends_on_the_type_of_computation() -> None:
    device = DEVICE_TYPES["nvidia-a100-80gb"]
    full, half, double = (
        reached(device, "matmul", dtype).flops_per_s for dtype in ("float32", "bfloat16", "float64")
    )
    assert half == pytest.approx(16 * full)
    assert double < full
    assert (
        reached(device, "conv").flops_per_s > 4 * full
    )  # cuDNN takes fp32 through the matrix units, cuBLAS does not
    assert reached(device, "never seen") == reached(device, "other")


@pytest.mark.parametrize(
    ("name", "gib", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "nvidia-a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "nvidia-a100-40gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "nvidia-v100-16gb"),
        ("Tesla V100-SXM2-32GB", 31.7, "nvidia-v100-32gb"),
        ("Tesla T4", 14.6, "nvidia-t4"),
        ("NVIDIA GeForce RTX 4090", 23.6, "nvidia-rtx4090"),
        ("NVIDIA L4", 22.0, "nvidia-l4"),
        ("NVIDIA L40S", 44.5, "nvidia-l40s"),
        ("NVIDIA H100 80GB HBM3", 79.1, "nvidia-h100-80gb"),
        ("NVIDIA H200", 139.8, "nvidia-h200"),
        ("AMD Instinct MI300X", 191.5, "amd-mi300x"),
        ("NVIDIA RTX 4090", 24.0, "nvidia-rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, None),
        ("NVIDIA A10", 22.5, "nvidia-a10"),
        ("NVIDIA A10G", 22.5, None),
        ("NVIDIA H100 NVL", 93.6, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.5, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
        ("Quadro P600", 2.0, None),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
        ("", 0.0, None),
    ],
)
def test_a_device_is_recognised_by_its_drivers_name(
    name: str, gib: float, found: str | None
) -> None:
    assert recognise(name, gib * 2**30) == found


def test_a_pcie_board_whose_datasheet_is_of_an_sxm_board_is_detected() -> None:
    assert other_board("NVIDIA A100-PCIE-40GB", "nvidia-a100-40gb")
    assert other_board("NVIDIA H200 NVL", "nvidia-h200")
    assert not other_board("NVIDIA A100-SXM4-40GB", "nvidia-a100-40gb")
    assert not other_board("NVIDIA L4", "nvidia-l4")


def test_a_gpus_index_counts_the_gpus_of_its_type() -> None:
    mixed = [
        ("NVIDIA L4", 22.0 * 2**30),
        ("NVIDIA H200", 139.8 * 2**30),
        ("NVIDIA L4", 22.0 * 2**30),
    ]
    assert [number_of("nvidia-l4", index, mixed) for index in range(3)] == [0, 2, None]
    assert number_of("nvidia-h200", 0, mixed) == 1
    assert number_of("nvidia-t4", 0, mixed) is None
