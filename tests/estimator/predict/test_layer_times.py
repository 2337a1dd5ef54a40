"""A step's time, divided among layers and phases."""

from __future__ import annotations

import pytest

from trainwright.estimator.curves import Affine
from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.structure import LayerWork, Operation, Structure

PRODUCT, UPDATE = "aten.addmm", "aten._foreach_add_"


def operation(kind: str, count: int, flops: float, *, per_sample: bool = True) -> Operation:
    """`count` calls of a product of `flops`, for each sample or in all."""
    line = (
        Affine(fixed=0.0, per_sample=flops) if per_sample else Affine(fixed=flops, per_sample=0.0)
    )
    return Operation(kind=kind, family="matmul", count=count, flops=line, bytes=line)


def structure(*layers: LayerWork) -> Structure:
    """Five calls of a product in the layers, and an update."""
    return Structure(
        batch_size=32,
        optimizer="sgd",
        precision="fp32",
        method="fake tensors",
        parameters=100,
        parameter_bytes=400,
        forward_flops_per_sample=1e6,
        activation_bytes_per_sample=10.0,
        peak_memory_bytes=Affine(fixed=1e3, per_sample=10.0),
        layers=[],
        features={},
        operations={},
        trace=[operation(PRODUCT, 5, 1e7), operation(UPDATE, 1, 1e9, per_sample=False)],
        layer_work=list(layers),
    )


LAYERS = (
    LayerWork(name="first", kind="Linear", forward=((0, 1.0),), weight_gradient=((0, 1.0),)),
    LayerWork(
        name="second",
        kind="Conv2d",
        forward=((0, 1.0),),
        input_gradient=((0, 0.5),),
        weight_gradient=((0, 1.5),),
    ),
    LayerWork(name="loss", kind="loss"),
)


@pytest.mark.parametrize("device", ["cpu", "nvidia-t4", "emulated"])
@pytest.mark.parametrize("batch", [4, 32, 200])
def test_layers_and_update_add_up_to_the_step(device: str, batch: int) -> None:
    speed, cores = (2.0 if device == "emulated" else None), (1.0 if device == "cpu" else None)
    curve = predict_curve(structure(*LAYERS), None, device_type=device, speed=speed, cores=cores)
    layers, update_s = curve.layer_seconds(batch)
    assert sum(map(sum, layers)) + update_s == pytest.approx(curve.median_s(batch))
    assert (update_s > 0) == (device != "emulated")


def test_an_emulated_device_takes_time_in_proportion_to_samples() -> None:
    curve = predict_curve(structure(*LAYERS), None, device_type="emulated", speed=4.0)
    layers, _ = curve.layer_seconds(7)
    more, _ = curve.layer_seconds(70)
    assert sum(map(sum, layers)) == pytest.approx(7 * EMULATED_SAMPLE_S / 4)
    for few, many in zip(layers, more, strict=True):
        assert many == pytest.approx([10 * one for one in few])
    whole = [
        one.forward(1) + one.input_gradient(1) + one.weight_gradient(1) for one in curve.layers
    ]
    assert sum(whole) == pytest.approx(EMULATED_SAMPLE_S)


def test_time_follows_the_calls_of_each_phase() -> None:
    curve = predict_curve(structure(*LAYERS), None, device_type="cpu", cores=1.0)
    (first, second, loss), _ = curve.layer_seconds(64)
    assert first.forward == pytest.approx(first.weight_gradient)
    assert first.input_gradient == 0
    assert second.forward == pytest.approx(2 * second.input_gradient)
    assert second.weight_gradient == pytest.approx(3 * second.input_gradient)
    assert loss == (0, 0, 0)


def test_a_structure_without_layers_has_no_layer_times() -> None:
    curve = predict_curve(structure(), None, device_type="cpu", cores=1.0)
    assert curve.layers == ()
    assert curve.layer_seconds(8)[0] == []
