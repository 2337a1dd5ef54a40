"""Device types and what their makers state of them: the prior for a device that nobody has measured yet.

Dense peaks without sparsity, FLOP/s; bandwidth of the device's memory, bytes/s; board power, W. `idle_w` is what such boards were
seen to draw when leased but waiting (vendors state none).
"""

from __future__ import annotations

from dataclasses import dataclass

EMULATED = "emulated"
EMULATED_SAMPLE_S = 1e-3
"""An emulated device of speed 1 takes this long for a sample: step time = EMULATED_SAMPLE_S · batch / speed."""


HOST_MEMORY_TYPES = ("cpu", EMULATED)
"""Devices whose ranks share the memory of their host."""


@dataclass(frozen=True)
class DeviceType:
    """A kind of device. `memory_bytes` is None where it is the host's."""

    name: str
    peak_flops: dict[str, float]
    bandwidth_bytes_per_s: float
    memory_bytes: float | None
    idle_w: float
    load_w: float
    source: str


def _gpu(
    name: str,
    fp64: float,
    fp32: float,
    bf16: float,
    bandwidth: float,
    memory: float,
    idle: float,
    load: float,
    source: str,
) -> DeviceType:
    peaks = {"fp64": fp64 * 1e12, "fp32": fp32 * 1e12, "bf16": bf16 * 1e12}
    return DeviceType(name, peaks, bandwidth * 1e9, memory * 2**30, idle, load, source)


# fp64, fp32, bf16 in TFLOP/s (where a type has no bf16 units: fp16, or fp32), GB/s, GiB, W, W
_TYPES = (
    _gpu("nvidia-m40-12gb", 0.21, 6.8, 6.8, 288, 12, 15, 250, "NVIDIA Tesla M40 datasheet (2016)"),
    _gpu("nvidia-p100-16gb", 5.3, 10.6, 21.2, 732, 16, 30, 300, "NVIDIA Tesla P100 SXM2 datasheet (2016), fp16"),
    _gpu("nvidia-v100-16gb", 7.8, 15.7, 125, 900, 16, 40, 300, "NVIDIA V100 SXM2 datasheet (2020), fp16 tensor cores"),
    _gpu("nvidia-v100-32gb", 7.8, 15.7, 125, 900, 32, 40, 300, "NVIDIA V100 SXM2 datasheet (2020), fp16 tensor cores"),
    _gpu("nvidia-t4", 0.25, 8.1, 65, 320, 16, 10, 70, "NVIDIA T4 datasheet (2019), fp16 tensor cores"),
    _gpu("nvidia-a10", 0.49, 31.2, 125, 600, 24, 20, 150, "NVIDIA A10 datasheet (2021)"),
    _gpu("nvidia-a100-40gb", 9.7, 19.5, 312, 1555, 40, 50, 400, "NVIDIA A100 SXM datasheet (2021)"),
    _gpu("nvidia-a100-80gb", 9.7, 19.5, 312, 2039, 80, 55, 400, "NVIDIA A100 SXM datasheet (2021)"),
    _gpu("nvidia-l4", 0.47, 30.3, 121, 300, 24, 13, 72, "NVIDIA L4 datasheet (2023)"),
    _gpu("nvidia-l40s", 1.4, 91.6, 362, 864, 48, 35, 350, "NVIDIA L40S datasheet (2023)"),
    _gpu("nvidia-rtx3090", 0.56, 35.6, 71, 936, 24, 25, 350, "NVIDIA Ampere GA102 whitepaper (2020)"),
    _gpu("nvidia-rtx4090", 1.3, 82.6, 165, 1008, 24, 25, 450, "NVIDIA Ada whitepaper (2022)"),
    _gpu("nvidia-h100-80gb", 34, 67, 989, 3350, 80, 70, 700, "NVIDIA H100 SXM datasheet (2023)"),
    _gpu("nvidia-h200", 34, 67, 989, 4800, 141, 75, 700, "NVIDIA H200 SXM datasheet (2024)"),
    _gpu("nvidia-b200", 37, 75, 2250, 8000, 180, 140, 1000, "NVIDIA DGX B200 datasheet (2024), per GPU"),
    _gpu("amd-mi300x", 81.7, 163.4, 1307, 5300, 192, 140, 750, "AMD Instinct MI300X datasheet (2023)"),
    # A core of a recent server CPU: 8 fp32 lanes x 2 FMA x 2 FLOP x 3 GHz, its part of the socket's bandwidth and power.
    DeviceType("cpu", {"fp64": 48e9, "fp32": 96e9, "bf16": 96e9}, 10e9, None, 2.0, 8.0, "assumed, for each core"),
    DeviceType(
        EMULATED, {"fp64": 48e9, "fp32": 96e9, "bf16": 96e9}, 10e9, None, 2.0, 8.0, "emulated: sleeps to its speed"
    ),
)

DEVICE_TYPES: dict[str, DeviceType] = {device.name: device for device in _TYPES}
