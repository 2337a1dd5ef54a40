"""The integer model: exact, and the same after it was stored."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import circuit_nets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.tasks.export.circuits import integer_model
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


def stored(path: Path, change: Any) -> Path:
    """A small model's file, after its document and arrays were changed."""
    torch.manual_seed(0)
    net, shape = circuit_nets.convolutional()
    circuit_nets.integers_of(net, circuit_nets.rows(shape, 20), 5).save(path)
    with np.load(path) as file:
        arrays = dict(file)
    said = json.loads(bytes(arrays["text"]))
    change(said, arrays)
    arrays["text"] = np.frombuffer(json.dumps(said).encode(), dtype=np.uint8)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("layers", 0, "shift"), 2**40, "got 1099511627776; allowed: whole numbers from 0 to 52"),
        (("layers", 0, "shape", "kind"), "system", "a layer of the kind 'system'"),
        (("layers", 0, "shape", "inputs"), [1, 2**30, 2**30], "layer 0 takes|products"),
        (("layers", 0, "shape", "padding"), [2**30, 2**30], "products; allowed"),
        (("layers", 0, "shape", "outputs"), [2, 9, 9], "its kernel does not give"),
        (("layers", 0, "low"), 2**70, "allowed: whole numbers"),
        (("layers", 0, "high"), -(2**20), "low above high"),
        (("layers", 0, "high"), None, "one bound"),
        (("layers", 0, "shape", "outputs"), [1, 8, 8], "weights of"),
        (("layers",), [], "0 layers"),
        (("low",), "0", "allowed: whole numbers"),
        (("low",), 2**31, "inputs from 2147483648"),
        (("output_scale",), float("nan"), "output_scale is not finite"),
        (("programs", "before", "steps"), [["eval", "x", ["inputs"]]], "the operation 'eval'"),
        (("programs", "before", "steps"), [["neg", "x"]], "not enough values"),
    ],
)
def test_a_file_with_a_wrong_field_is_refused_in_one_line(
    place: tuple[Any, ...], value: Any, says: str, tmp_path: Path
) -> None:
    def change(said: Any, _: Any) -> None:
        for key in place[:-1]:
            said = said[key]
        said[place[-1]] = value

    path = stored(tmp_path / "model.npz", change)
    with pytest.raises(ValueError, match=f"^model.npz is not an integer model: .*({says})"):
        load(path)


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("weights-0", np.full((2, 9), 2**62), "layer 0 has sums of more than 53 bits"),
        ("weights-0", np.ones((2, 9)), "weights of the type float64"),
        ("weights-0", np.array([object()]), "array weights-0"),
        ("bias-0", np.ones(3, np.int64), r"biases of \(3,\)"),
        ("scale", np.ones(7), r"scale of the shape \(7,\)"),
        ("centre", np.array([np.inf]), "centre is not finite"),
        ("before-c9", np.zeros(2**23 + 1), "67,.* bytes; allowed: 67,108,864"),
    ],
)
def test_a_file_with_a_wrong_array_is_refused(
    name: str, array: Any, says: str, tmp_path: Path
) -> None:
    path = stored(tmp_path / "model.npz", lambda _, arrays: arrays.update({name: array}))
    with pytest.raises(ValueError, match=says):
        load(path)


def test_an_array_that_claims_more_values_than_it_has_is_not_allocated(tmp_path: Path) -> None:
    path, head = tmp_path / "model.npz", io.BytesIO()
    claim = {"descr": "<i8", "fortran_order": False, "shape": (2**50,)}
    np.lib.format.write_array_header_1_0(head, claim)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("text.npy", head.getvalue())
    with pytest.raises(ValueError, match=r"the array text\.npy"):
        load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("text.npy", bytes(2**20))
    with pytest.raises(ValueError, match=r"text\.npy is compressed"):
        load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="not an integer model: File is not a zip file"):
        load(path)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([["cat", f"v{n + 1}", [[f"v{n}", f"v{n}"], 1]] for n in range(60)], "values"),
        ([["one_hot_sum", "v60", ["v0", 2**40]]], "more than 268,435,456 values"),
        ([["pow", "v60", [9**9, 9**9]]], "pow without an array"),
        ([["add", "v60", ["v0", [1], 2**40]]], "add of a list"),
        ([["slice", "v60", ["v0", 2**40, 0, 1]]], "a slice of dimension"),
        ([["neg", "v60", ["elsewhere"]]], "elsewhere"),
        ([["cat", "v60", [[1, 2], 0]]], "has no attribute"),
        ([["columns", "v60", ["v0", [0]]]], "20 numbers for 20 rows of 64 inputs"),
    ],
)
def test_a_host_program_that_would_fill_the_memory_or_fits_no_rows_is_refused(
    steps: Any, says: str, tmp_path: Path
) -> None:
    def change(said: Any, _: Any) -> None:
        first = ["reshape", "v0", ["inputs", [64]]]
        said["programs"]["before"] = {"steps": [first, *steps], "result": "v60"}

    model = load(stored(tmp_path / "model.npz", change))
    with pytest.raises(ValueError, match=says):
        model.prepare({"inputs": circuit_nets.rows((1, 8, 8), 20)})


def test_rows_computed_in_parts_are_those_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    net, shape = circuit_nets.convolutional()
    model = circuit_nets.integers_of(net, circuit_nets.rows(shape, 20), 5)
    inputs = model.prepare({"inputs": circuit_nets.rows(shape, 20)})
    found = model.run(inputs)
    monkeypatch.setattr(integer_model, "_MOST_PRODUCTS", 8_000)
    assert np.array_equal(model.run(inputs), found)


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
