"""An operation's cost by the datasheet: the prior for a device, from its peaks and efficiencies.

Arithmetic; loads no torch.

    t = latency + max(flops / (share · peak), bytes / (share · bandwidth))

The shares of a device's peaks that eager training reaches, by family of operations, are
assumptions: rounded, the same for all devices, and not fitted. End to end, training of large
transformers reaches 0.44 to 0.52 of the arithmetic peak (Narayanan et al., arXiv:2104.04473).
Operations other than matrix products are bound by memory and reach a part of the bandwidth (Ivanov
et al., Data Movement Is All You Need, arXiv:2007.00072). A single device differs from the shares by
`RATE_WIDTH`.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.estimator.devices import DeviceType
from trainwright.estimator.predict.op_cost import Roofline

RATE_WIDTH = 0.7
"""The standard deviation of log(reached rate / (share · peak)): a factor of two is common."""
LATENCY_WIDTH = 0.7
"""The standard deviation of the logarithm of a call's time, which depends mostly on the host."""
CALL_S = 8e-6
"""An operation called from Python with autograd: 5 to 10 µs on hosts of 2015 to 2025."""
VIEW_S = 2e-6
"""An operation that computes nothing."""

# family: shares of the arithmetic peak and of the bandwidth
_SHARES: Mapping[str, tuple[float, float]] = {
    "matmul": (0.6, 0.7),
    "conv": (0.45, 0.6),
    "conv_backward": (0.4, 0.5),
    "grouped conv": (0.1, 0.4),
    "grouped conv_backward": (0.05, 0.3),
    "attention": (0.35, 0.6),
    "rnn": (0.3, 0.5),
    "elementwise": (0.5, 0.7),
    "fill": (0.5, 0.7),
    "copy": (0.5, 0.6),
    "reduction": (0.5, 0.6),
    "norm": (0.5, 0.5),
    "softmax": (0.5, 0.5),
    "pool": (0.5, 0.4),
    "index": (0.5, 0.3),
    "random": (0.5, 0.3),
    "other": (0.2, 0.3),
    "view": (0.5, 0.7),
}
FAMILIES = tuple(_SHARES)
_TF32 = ("conv", "conv_backward", "rnn")  # computed by cuDNN, in tf32 by PyTorch's default
_DTYPES = {"float64": "fp64", "bfloat16": "bf16", "float16": "bf16"}


def reached(device: DeviceType, family: str, dtype: str = "float32") -> Roofline:
    """The datasheet's cost of a family's operations in a dtype; an unknown family is `other`."""
    flops_share, bytes_share = _SHARES.get(family, _SHARES["other"])
    peak = _DTYPES.get(dtype, "fp32")
    if peak == "fp32" and family in _TF32 and "tf32" in device.peak_flops:
        peak = "tf32"
    return Roofline(
        latency_s=VIEW_S if family == "view" else CALL_S,
        flops_per_s=device.peak_flops[peak] * flops_share,
        bytes_per_s=device.bandwidth_bytes_per_s * bytes_share,
    )
