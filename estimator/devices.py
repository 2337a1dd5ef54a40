"""Device types and their datasheets: the prior for a device that nobody has measured.

Peaks are dense, without sparsity, in FLOP/s; bandwidth is that of the device's memory in bytes/s;
power is the board's in W. Each figure has its source (`DeviceType.sources`): the maker's document,
or a stated assumption.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainwright.estimator.errors import BadInput

EMULATED = "emulated"
EMULATED_SAMPLE_S = 1e-3
"""An emulated device takes EMULATED_SAMPLE_S · batch / speed for a step of data parallel."""

HOST_MEMORY_TYPES = ("cpu", EMULATED)
"""Devices whose ranks use the memory of their host."""

IDLE_SHARE = 0.15
"""The share of board power that a device draws while its process waits.

An assumption, because makers state none. On H100, A100 and L40S a context adds 26 to 66 W to the
power of the bare board (arXiv:2605.23918).
"""
LINK_SHARE, LINK_LATENCY_S = 0.5, 30e-6
"""The share of a link's peak that a sum among devices of a host reaches, and its latency.

Of NVLink, NCCL reached 0.83 on A100 (249 of 300 GB/s), 0.45 on V100 (68 of 150) and 0.56 on GH200
(251 of 450); of PCIe with 16 lanes 0.69 on RTX 2080 (10.8 of 15.8) and 0.25 on four RTX 3090 (7.9
of 31.5): the fits of links inside a host in the artifact of Sailor (SOSP 2025, eth-easl/sailor).
The latency is an assumption.
"""
_IDLE_SOURCE = (
    f"assumed: {IDLE_SHARE:.0%} of board power; size as in https://arxiv.org/abs/2605.23918"
)


@dataclass(frozen=True)
class DeviceType:
    """A kind of device. `memory_bytes` is None if it uses the host's memory.

    `peak_flops` has fp64, fp32 and bf16, and tf32 if the matrix units compute fp32 that way.
    PyTorch's convolutions use tf32 by default, its matrix products do not
    (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32). `source` holds for
    every figure that is not in `other_sources`.
    """

    name: str
    peak_flops: dict[str, float]
    bandwidth_bytes_per_s: float
    memory_bytes: float | None
    idle_w: float
    load_w: float
    source: str
    other_sources: dict[str, str] = field(default_factory=dict)
    link: str | None = None
    """what connects it with other devices of its kind on a host; None: the host's memory"""
    link_bytes_per_s: float | None = None
    """of that in one direction, at its peak"""

    @property
    def is_gpu(self) -> bool:
        """Whether it has memory of its own."""
        return self.memory_bytes is not None

    @property
    def sources(self) -> dict[str, str]:
        """The source of each figure by its name; a peak's name is like `peak_flops.fp32`."""
        names = [f"peak_flops.{dtype}" for dtype in self.peak_flops]
        names += ["bandwidth_bytes_per_s", "memory_bytes", "idle_w", "load_w"]
        names += ["link_bytes_per_s"] if self.link else []
        return {name: self.other_sources.get(name, self.source) for name in names}


def _gpu(
    name: str,
    peaks: tuple[float, float, float, float | None],
    bandwidth: float,
    memory: float,
    load: float,
    source: str,
    link: tuple[str, float],
    **other: str,
) -> DeviceType:
    flops = {
        key: peak * 1e12
        for key, peak in zip(("fp64", "fp32", "bf16", "tf32"), peaks, strict=True)
        if peak
    }
    sources = {f"peak_flops.{key}": text for key, text in other.items()} | {"idle_w": _IDLE_SOURCE}
    if link[0].startswith("PCIe"):
        sources["link_bytes_per_s"] = f"{link[0]} by the device's datasheet; {_PCIE}"
    return DeviceType(
        name,
        flops,
        bandwidth * 1e9,
        memory * 2**30,
        IDLE_SHARE * load,
        load,
        source,
        sources,
        link[0],
        link[1] * 1e9,
    )


_DOCS = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_IMAGES = "https://images.nvidia.com"
_RESOURCES = "https://resources.nvidia.com"
_V100 = (
    f"{_IMAGES}/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf (SXM2)"
)
_A100 = f"{_DOCS}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf (SXM)"
_GA102 = (
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_ADA = f"{_IMAGES}/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_M40 = f"{_IMAGES}/content/tesla/pdf/78071_Tesla_M40_24GB_Print_Datasheet_LR.PDF"
_H200 = (
    f"{_RESOURCES}/en-us-data-center-overview-mc/en-us-data-center-overview/"
    "hpc-datasheet-sc23-h200 (SXM)"
)
_MI300X = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/"
    "amd-instinct-mi300x-data-sheet.pdf"
)
_NO_HALF = "its fp32, as the device has no faster half precision"
_FP16 = "its fp16, as the device has no bf16 units"
_FP64_32ND, _FP64_64TH = (
    "1/32 of fp32, by the architecture's whitepaper",
    "1/64 of fp32, by the architecture's whitepaper",
)
_SPARSE = "half of the sparse figure in the device's datasheet"
_ASSUMED = "assumed, for each core"
_PCIE = "8 and 16 GT/s a lane, 128b/130b: https://pcisig.com/faq"
_PCIE_3, _PCIE_4 = ("PCIe 3.0 x16", 15.75), ("PCIe 4.0 x16", 31.5)
# Half of what datasheets state, which is of both directions together.
_NVLINK_1, _NVLINK_2, _NVLINK_3 = ("NVLink 1", 80.0), ("NVLink 2", 150.0), ("NVLink 3", 300.0)
_NVLINK_4, _NVLINK_5 = ("NVLink 4", 450.0), ("NVLink 5", 900.0)

# (fp64, fp32, bf16, tf32) in TFLOP/s, GB/s, GiB, W; the link in one direction in GB/s
_TYPES = (
    _gpu(
        "nvidia-m40-12gb",
        (0.21, 6.8, 6.8, None),
        288,
        12,
        250,
        f"{_M40} (12 GB: its 2015 issue)",
        _PCIE_3,
        fp64=_FP64_32ND,
        bf16=_NO_HALF,
    ),
    _gpu(
        "nvidia-p100-16gb",
        (5.3, 10.6, 21.2, None),
        732,
        16,
        300,
        f"{_IMAGES}/content/tesla/pdf/nvidia-tesla-p100-datasheet.pdf (SXM2)",
        _NVLINK_1,
        bf16=_FP16,
    ),
    _gpu("nvidia-v100-16gb", (7.8, 15.7, 125, None), 900, 16, 300, _V100, _NVLINK_2, bf16=_FP16),
    _gpu("nvidia-v100-32gb", (7.8, 15.7, 125, None), 900, 32, 300, _V100, _NVLINK_2, bf16=_FP16),
    _gpu(
        "nvidia-t4",
        (0.25, 8.1, 65, None),
        320,
        16,
        70,
        f"{_DOCS}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
        _PCIE_3,
        fp64=_FP64_32ND,
        bf16=_FP16,
    ),
    _gpu(
        "nvidia-a10",
        (0.49, 31.2, 125, 62.5),
        600,
        24,
        150,
        f"{_DOCS}/Data-Center/a10/pdf/a10-datasheet.pdf",
        _PCIE_4,
        fp64=_FP64_64TH,
    ),
    _gpu("nvidia-a100-40gb", (9.7, 19.5, 312, 156), 1555, 40, 400, _A100, _NVLINK_3),
    _gpu("nvidia-a100-80gb", (9.7, 19.5, 312, 156), 2039, 80, 400, _A100, _NVLINK_3),
    _gpu(
        "nvidia-l4",
        (0.47, 30.3, 121, 60),
        300,
        24,
        72,
        f"{_RESOURCES}/en-us-data-center-overview/l4-gpu-datasheet",
        _PCIE_4,
        fp64=_FP64_64TH,
        bf16=_SPARSE,
        tf32=_SPARSE,
    ),
    _gpu(
        "nvidia-l40s",
        (1.4, 91.6, 362, 183),
        864,
        48,
        350,
        f"{_RESOURCES}/en-us-l40s/l40s-datasheet-28413",
        _PCIE_4,
        fp64=_FP64_64TH,
    ),
    _gpu(
        "nvidia-rtx3090",
        (0.56, 35.6, 71, 35.6),
        936,
        24,
        350,
        f"{_GA102}, table 9",
        _PCIE_4,
        fp64=_FP64_64TH,
    ),
    _gpu(
        "nvidia-rtx4090",
        (1.3, 82.6, 165, 82.6),
        1008,
        24,
        450,
        f"{_ADA}, appendix A",
        _PCIE_4,
        fp64=_FP64_64TH,
    ),
    _gpu(
        "nvidia-h100-80gb",
        (34, 67, 989, 495),
        3350,
        80,
        700,
        f"{_RESOURCES}/en-us-gpu-resources/h100-datasheet-24306 (SXM)",
        _NVLINK_4,
        bf16=_SPARSE,
        tf32=_SPARSE,
    ),
    _gpu(
        "nvidia-h200",
        (34, 67, 989, 495),
        4800,
        141,
        700,
        _H200,
        _NVLINK_4,
        bf16=_SPARSE,
        tf32=_SPARSE,
    ),
    _gpu(
        "nvidia-b200",
        (37, 75, 2250, 1100),
        8000,
        180,
        1000,
        "https://www.nvidia.com/en-us/data-center/hgx/ (HGX B200, an eighth)",
        _NVLINK_5,
        bf16=_SPARSE,
        tf32=_SPARSE,
    ),
    _gpu(
        "amd-mi300x",
        (81.7, 163.4, 1307, None),
        5300,
        192,
        750,
        _MI300X,
        ("Infinity Fabric", 448.0),
    ),
    # A core of a recent server CPU: 8 fp32 lanes x 2 FMA x 2 FLOP x 3 GHz, and its share of the
    # socket's bandwidth and power.
    DeviceType("cpu", {"fp64": 48e9, "fp32": 96e9, "bf16": 96e9}, 10e9, None, 2.0, 8.0, _ASSUMED),
    DeviceType(
        EMULATED, {"fp64": 48e9, "fp32": 96e9, "bf16": 96e9}, 10e9, None, 2.0, 8.0, _ASSUMED
    ),
)

_OFF = 0.15  # allowed difference between the driver's memory size and the datasheet's

DEVICE_TYPES: dict[str, DeviceType] = {device.name: device for device in _TYPES}


def known_type(name: str) -> DeviceType:
    """The device type with this name. Raises BadInput if there is none."""
    if name not in DEVICE_TYPES:
        raise BadInput(
            f"device type: got {name[:80]!r}; allowed: {', '.join(sorted(DEVICE_TYPES))}"
        )
    return DEVICE_TYPES[name]


def summing_type(device_types: Collection[str]) -> str | None:
    """The type of devices that sum gradients among each other (NCCL): NVIDIA GPUs of one type.

    None: others sum in the memory of their hosts.
    """
    types = set(device_types)
    only = next(iter(types)) if len(types) == 1 else ""
    return only if only.startswith("nvidia-") else None


def half_precision(device_type: str) -> Literal["bf16", "fp16"]:
    """The type in which `amp` computes on a device type: fp16 if it has no bf16 units."""
    known = DEVICE_TYPES.get(device_type)
    return "fp16" if known and known.sources.get("peak_flops.bf16") in (_FP16, _NO_HALF) else "bf16"


def threads_of(cores: float | None) -> int:
    """The number of threads of a CPU device with this many cores: whole, at least one."""
    return max(1, int(cores or 1))


def cores_used(cores: float | None) -> float:
    """The cores that those threads keep busy: one of 1.5 cores, all of half a core."""
    return min(cores or 1.0, float(threads_of(cores)))


def recognise(name: str, memory_bytes: float) -> str | None:
    """The device type of a GPU, from its driver's name and its memory; None if it is not known.

    "NVIDIA A100-SXM4-80GB" is nvidia-a100-80gb. Drivers show up to 15 % less memory than the
    datasheet; a larger difference means another device (H100 NVL, a laptop's RTX 4090). A slice of
    a device (MIG) has no type.
    """
    words = name.lower().replace("rtx ", "rtx").replace("-", " ").split()
    if "mig" in words:
        return None
    for one in _TYPES:
        model = one.name.split("-")[1:2]
        if (
            one.memory_bytes
            and model
            and model[0] in words
            and abs(memory_bytes / one.memory_bytes - 1) < _OFF
        ):
            return one.name
    return None


def other_board(name: str, device_type: str) -> bool:
    """Whether a GPU is a PCIe board (by its driver's name) but its datasheet is for SXM boards."""
    words = name.lower().replace("-", " ").split()
    on_sxm = any("(SXM" in source for source in DEVICE_TYPES[device_type].sources.values())
    return on_sxm and ("pcie" in words or "nvl" in words)


def number_of(device_type: str, index: int, gpus: Sequence[tuple[str, float]]) -> int | None:
    """The number of the index-th GPU of a type among a machine's (name, memory in bytes).

    None if there are fewer.
    """
    alike = [
        number
        for number, (name, memory) in enumerate(gpus)
        if recognise(name, memory) == device_type
    ]
    return alike[index] if index < len(alike) else None
