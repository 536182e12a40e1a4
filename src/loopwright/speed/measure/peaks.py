"""Peak rates of devices: one table, from the makers' data sheets, without sparsity."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

TERA = 1e12
DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")


class Peak(NamedTuple):
    """Rates of dense matrix products with fp32 accumulation, in TFLOP/s; None if the device has no such units."""

    bf16: float | None = None
    fp16: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    fp8: float | None = None


def _half(rate: float, tf32: float | None, fp32: float, fp8: float | None = None) -> Peak:
    """A peak with the same rate for bf16 and fp16."""
    return Peak(rate, rate, tf32, fp32, fp8)


_HOPPER_SXM = _half(989.4, 494.7, 66.9, 1978.9)
_HOPPER_NVL = _half(835.5, 417.5, 60.0, 1670.5)

PEAKS: tuple[tuple[str, Peak], ...] = (
    # NVIDIA, data centre
    (r"V100S", Peak(fp16=130.0, fp32=16.4)),
    (r"V100-?PCIE|V100 PCIe", Peak(fp16=112.0, fp32=14.0)),
    (r"V100", Peak(fp16=125.0, fp32=15.7)),
    (r"Tesla T4|NVIDIA T4", Peak(fp16=65.0, fp32=8.1)),
    (r"A10G", _half(70.0, 35.0, 31.5)),
    (r"A10", _half(125.0, 62.5, 31.2)),
    (r"A30", _half(165.0, 82.0, 10.3)),
    (r"A40", _half(149.7, 74.8, 37.4)),
    (r"A100|A800", _half(312.0, 156.0, 19.5)),
    (r"L4", _half(121.0, 60.0, 30.3, 242.5)),
    (r"L20", _half(119.5, 59.8, 59.8, 239.0)),
    (r"L40S", _half(362.0, 183.0, 91.6, 733.0)),
    (r"L40", _half(181.0, 90.5, 90.5, 362.0)),
    (r"H20", _half(148.0, 74.0, 44.0, 296.0)),
    (r"H100 PCIe", _half(756.0, 378.0, 51.0, 1513.0)),
    (r"H100 NVL|H200 NVL", _HOPPER_NVL),
    (r"H100|H800|H200|GH200", _HOPPER_SXM),
    (r"GB200|GB300", _half(2500.0, 1250.0, 80.0, 5000.0)),
    (r"B200|B300", _half(2250.0, 1125.0, 75.0, 4500.0)),
    (r"B100", _half(1750.0, 875.0, 60.0, 3500.0)),
    # NVIDIA, workstations
    (r"RTX PRO 6000 Blackwell", _half(503.8, 251.9, 125.9, 1007.6)),
    (r"RTX 6000 Ada", _half(364.2, 182.1, 91.1, 728.5)),
    (r"RTX A6000", _half(154.8, 77.4, 38.7)),
    # NVIDIA, desktops: fp32 accumulation runs at half the rate of fp16 accumulation
    (r"RTX 3060", _half(25.3, 12.7, 12.7)),
    (r"RTX 3070", _half(40.6, 20.3, 20.3)),
    (r"RTX 3080 Ti", _half(68.2, 34.1, 34.1)),
    (r"RTX 3080", _half(59.5, 29.8, 29.8)),
    (r"RTX 3090 Ti", _half(80.0, 40.0, 40.0)),
    (r"RTX 3090", _half(71.0, 35.6, 35.6)),
    (r"RTX 4060 Ti", _half(44.1, 22.1, 22.1, 88.2)),
    (r"RTX 4070 Ti SUPER", _half(88.2, 44.1, 44.1, 176.4)),
    (r"RTX 4070 Ti", _half(80.2, 40.1, 40.1, 160.4)),
    (r"RTX 4070 SUPER", _half(71.0, 35.5, 35.5, 142.0)),
    (r"RTX 4070", _half(58.3, 29.1, 29.1, 116.6)),
    (r"RTX 4080 SUPER", _half(104.4, 52.2, 52.2, 208.8)),
    (r"RTX 4080", _half(97.5, 48.7, 48.7, 194.9)),
    (r"RTX 4090", _half(165.2, 82.6, 82.6, 330.3)),
    (r"RTX 5070 Ti", _half(87.9, 43.9, 43.9, 175.8)),
    (r"RTX 5070", _half(61.7, 30.9, 30.9, 123.5)),
    (r"RTX 5080", _half(112.6, 56.3, 56.3, 225.1)),
    (r"RTX 5090", _half(209.5, 104.8, 104.8, 419.0)),
    # AMD; torch sees one of the two dies of an MI250 or MI250X
    (r"MI210", _half(181.0, None, 45.3)),
    (r"MI250X", _half(191.5, None, 47.9)),
    (r"MI250", _half(181.0, None, 45.3)),
    (r"MI300A", _half(980.6, 490.3, 122.6, 1961.2)),
    (r"MI300X|MI325X", _half(1307.4, 653.7, 163.4, 2614.9)),
    (r"MI350X", _half(2306.9, None, 144.2, 4613.7)),
    (r"MI355X", _half(2516.6, None, 157.3, 5033.2)),
    # Google, per chip
    (r"TPU v4", Peak(bf16=275.0)),
    (r"TPU v5 ?lite|TPU v5e", Peak(bf16=197.0)),
    (r"TPU v5p?", Peak(bf16=459.0)),
    (r"TPU v6 ?lite|TPU v6e?", Peak(bf16=918.0)),
    (r"TPU v?7x?", Peak(bf16=2307.0, fp8=4614.0)),
    # Amazon, per chip (a chip holds several NeuronCores)
    (r"Trainium1|Trainium|trn1", _half(190.0, 190.0, 47.5, 190.0)),
    (r"Trainium2|trn2", _half(667.0, None, 181.0, 1299.0)),
)
"""Patterns of device names and their peaks; the first match counts. If devices share a name, the faster one is listed:
utilization may then be reported too low, never too high."""

_NEVER = re.compile(r"laptop|mobile|max-?q|\bMIG\b|D v\d", re.IGNORECASE)
"""Names of slower variants, whose clocks the laptop's maker chooses, and of partitions of a device."""


def find_peak(name: str) -> Peak | None:
    """The peaks of a device; None if it is not in the table."""
    if _NEVER.search(name):
        return None
    for pattern, peak in PEAKS:
        # Match complete words only: L4 is not L40, and A100 is not A10.
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", name, re.IGNORECASE):
            return peak
    return None


def peak_operations(name: str, dtype: str) -> float | None:
    """Operations per second of a device by its name and one of DTYPES; None if unknown."""
    peak = find_peak(name)
    rate = None if peak is None else getattr(peak, dtype)
    return None if rate is None else rate * TERA


def device_name(device: torch.device) -> str | None:
    """The name a device reports; None for devices without one, such as the CPU."""
    module = getattr(torch, device.type, None)
    name = getattr(module, "get_device_name", None)
    return str(name(device)) if callable(name) else None


def device_peak(device: torch.device, dtype: str) -> float | None:
    """Operations per second of this device; None if unknown, as for every CPU."""
    name = None if device.type == "cpu" else device_name(device)
    return None if name is None else peak_operations(name, dtype)
