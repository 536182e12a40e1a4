"""The table of device peaks: names as drivers report them."""

from __future__ import annotations

import re

import pytest
import torch

from loopwright.speed.measure.peaks import DTYPES, PEAKS, Peak, device_peak, find_peak, peak_operations

NAMES = {
    "Tesla V100-SXM2-16GB": ("fp16", 125.0),
    "Tesla V100-PCIE-32GB": ("fp16", 112.0),
    "Tesla V100S-PCIE-32GB": ("fp16", 130.0),
    "Tesla T4": ("fp16", 65.0),
    "NVIDIA A10": ("bf16", 125.0),
    "NVIDIA A10G": ("bf16", 70.0),
    "NVIDIA A100-SXM4-40GB": ("bf16", 312.0),
    "NVIDIA A100 80GB PCIe": ("tf32", 156.0),
    "NVIDIA L4": ("bf16", 121.0),
    "NVIDIA L40S": ("bf16", 362.0),
    "NVIDIA L40": ("bf16", 181.0),
    "NVIDIA GeForce RTX 3090": ("bf16", 71.0),
    "NVIDIA GeForce RTX 3090 Ti": ("bf16", 80.0),
    "NVIDIA GeForce RTX 4090": ("bf16", 165.2),
    "NVIDIA GeForce RTX 5090": ("bf16", 209.5),
    "NVIDIA H100 80GB HBM3": ("bf16", 989.4),
    "NVIDIA H100 PCIe": ("bf16", 756.0),
    "NVIDIA H100 NVL": ("bf16", 835.5),
    "NVIDIA H200": ("bf16", 989.4),
    "NVIDIA H200 NVL": ("bf16", 835.5),
    "NVIDIA GH200 480GB": ("bf16", 989.4),
    "NVIDIA B200": ("bf16", 2250.0),
    "NVIDIA GB200": ("bf16", 2500.0),
    "NVIDIA B300 SXM6 AC": ("fp8", 4500.0),
    "AMD Instinct MI210": ("bf16", 181.0),
    "AMD Instinct MI250X / MI250": ("bf16", 191.5),
    "AMD Instinct MI300X": ("bf16", 1307.4),
    "AMD Instinct MI325X": ("fp8", 2614.9),
    "AMD Instinct MI355X": ("bf16", 2516.6),
    "TPU v4": ("bf16", 275.0),
    "TPU v5 lite": ("bf16", 197.0),
    "TPU v5p": ("bf16", 459.0),
    "TPU v6 lite": ("bf16", 918.0),
    "AWS Trainium2": ("bf16", 667.0),
}


def test_a_device_is_found_by_the_name_it_gives_itself() -> None:
    found = {name: peak_operations(name, dtype) for name, (dtype, _) in NAMES.items()}
    assert found == {name: pytest.approx(rate * 1e12) for name, (_, rate) in NAMES.items()}


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 5090 D v2",
        "Quadro P1000",
        "NVIDIA GeForce GTX 1080",
        "NVIDIA A1000",
        "AMD Ryzen 9 7950X",
        "cpu",
        "",
    ],
)
def test_relatives_and_strangers_are_unknown(name: str) -> None:
    assert find_peak(name) is None
    assert all(peak_operations(name, dtype) is None for dtype in DTYPES)


def test_a_format_the_device_has_no_units_for_is_unknown() -> None:
    assert peak_operations("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_operations("NVIDIA A100-SXM4-40GB", "fp8") is None


def test_a_cpu_has_no_peak() -> None:
    assert all(device_peak(torch.device("cpu"), dtype) is None for dtype in DTYPES)


def test_rows_are_sound() -> None:
    for pattern, peak in PEAKS:
        re.compile(pattern)
        half = [rate for rate in (peak.bf16, peak.fp16) if rate is not None]
        assert half and all(rate > 0 for rate in half), pattern
        rates = [rate for rate in (peak.fp32, peak.tf32, half[0], peak.fp8) if rate is not None]
        assert rates == sorted(rates), f"{pattern}: a narrower format is never slower"


def test_fields_of_a_row_are_the_formats() -> None:
    assert Peak._fields == DTYPES
