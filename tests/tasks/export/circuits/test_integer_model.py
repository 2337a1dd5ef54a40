"""The integer model: exact, and the same after it was stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import circuit_nets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.tasks.export.circuits.integer_model import IntegerLayer, LayerShape, load
from trainwright.tasks.export.circuits.predict_cells import adder_bits, signed_digits


@pytest.mark.parametrize("make", [circuit_nets.dense, circuit_nets.convolutional])
@pytest.mark.parametrize("bits", [3, 6])
def test_the_quantised_network_computes_what_its_integers_do(make: Any, bits: int) -> None:
    torch.manual_seed(0)
    net, shape = make()
    rows = circuit_nets.rows(shape, 40, signed=bits == 3)
    circuit = circuit_nets.circuit_of(net, rows)
    network = circuit_nets.quantised(circuit, rows, bits)
    model = network.integer_model()
    numbers = rows.reshape(40, -1)
    expected = network(torch.from_numpy(numbers)).detach().numpy()
    found = model.run(model.quantised(numbers)) * model.output_scale
    assert np.array_equal(found, expected)


def test_a_stored_model_gives_the_same_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, shape = circuit_nets.convolutional()
    rows = circuit_nets.rows(shape, 20)
    model = circuit_nets.integers_of(net, rows, 5)
    model.save(tmp_path / "model.npz")
    again = load(tmp_path / "model.npz")
    inputs = model.prepare({"inputs": rows})
    assert np.array_equal(inputs, again.prepare({"inputs": rows}))
    assert np.array_equal(model.outputs(model.run(inputs)), again.outputs(again.run(inputs)))
    assert again.layers[0].shape == model.layers[0].shape


def test_wide_integers_are_close_to_the_trained_outputs() -> None:
    torch.manual_seed(0)
    net, shape = circuit_nets.convolutional()
    rows = circuit_nets.rows(shape, 50)
    model = circuit_nets.integers_of(net.eval(), rows, 8)
    exact = net(torch.from_numpy(rows)).detach().numpy()
    found = model.outputs(model.run(model.prepare({"inputs": rows})))
    assert np.abs(found - exact).max() < 0.03 * np.ptp(exact)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_sum_leaves_the_range_that_is_predicted_for_it(data: Any) -> None:
    terms, outputs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    numbers = st.integers(-31, 31)
    weights = data.draw(st.lists(numbers, min_size=terms * outputs, max_size=terms * outputs))
    bias = data.draw(st.lists(numbers, min_size=outputs, max_size=outputs))
    low, high = sorted(data.draw(st.tuples(st.integers(-8, 7), st.integers(-8, 7))))
    given_rows = data.draw(st.lists(st.integers(low, high), min_size=terms, max_size=terms))
    layer = IntegerLayer(
        LayerShape("x", "dense", (terms, 1, 1), (outputs, 1, 1), (1, 1)),
        np.array(weights).reshape(outputs, terms),
        np.array(bias),
    )
    found = layer.run(np.array(given_rows).reshape(1, terms, 1, 1))
    least, most = layer.sum_range(low, high)
    assert least <= found.min()
    assert found.max() <= most


@given(st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=20))
def test_signed_digits_are_never_more_than_the_ones_of_a_number(numbers: list[int]) -> None:
    digits = signed_digits(np.array(numbers))
    for number, count in zip(numbers, digits, strict=True):
        assert (count == 0) == (number == 0)
        assert count <= abs(number).bit_count()
        assert count <= abs(number).bit_length() // 2 + 1


def test_wider_weights_are_predicted_to_take_more_cells() -> None:
    torch.manual_seed(0)
    net, shape = circuit_nets.convolutional()
    rows = circuit_nets.rows(shape, 20)
    sizes = [sum(adder_bits(circuit_nets.integers_of(net, rows, bits))) for bits in (3, 5, 8)]
    assert sizes == sorted(sizes)
    assert sizes[0] > 0
