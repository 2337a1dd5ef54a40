"""The trace of a training step: counts equal torch's, and are linear in the batch size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainwright.estimator.errors import BadInput
from trainwright.estimator.memory.step_memory import peak_bytes
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import BatchSpec, ModelDefinition, build
from trainwright.estimator.trace.trace import TrainingStepSpec, trace
from trainwright.estimator.trace.trainable_model import require_trainable

IMAGES = BatchSpec(
    inputs={"inputs": (1, 8, 8)},
    input_dtypes={"inputs": "float32"},
    target_dtype="int64",
    classes=10,
    task="image-classification",
)
TOKENS = IMAGES.model_copy(
    update={"inputs": {"inputs": (12,)}, "input_dtypes": {"inputs": "int64"}}
)


class _Encoder(nn.Module):
    """A transformer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
        )
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class _Branching(nn.Module):
    """Reads the values of its activations, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = self.head(images.flatten(1))
        return outputs * 2 if outputs.sum().item() > 0 else outputs


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24 * 16, 40),
        nn.ReLU(),
        nn.Linear(40, 10),
    )


def _dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def _traced(
    build: Callable[[], nn.Module],
    spec: BatchSpec = IMAGES,
    *,
    batch_size: int = 16,
    optimizer: str = "adamw",
    precision: str = "fp32",
) -> Structure:
    what = TrainingStepSpec(
        ModelDefinition(build, None, None), {}, spec, {"name": optimizer}, precision
    )
    return trace(what, batch_size)


def _total(structure: Structure, quantity: str, batch_size: int) -> float:
    return sum(one.count * getattr(one, quantity)(batch_size) for one in structure.trace)


@pytest.mark.parametrize(
    ("build", "spec"), [(_convolutional, IMAGES), (_dense, IMAGES), (_Encoder, TOKENS)]
)
def test_parameters_and_forward_flops_equal_torchs_counts(
    build: Callable[[], nn.Module], spec: BatchSpec
) -> None:
    structure, model = _traced(build, spec), build()
    dtype = getattr(torch, spec.input_dtypes["inputs"])
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros((16, *spec.inputs["inputs"]), dtype=dtype))
    assert structure.method == "fake tensors"
    assert structure.parameters == sum(one.numel() for one in model.parameters())
    assert structure.forward_flops_per_sample * 16 == counter.get_total_flops()


def test_the_forward_flops_of_the_layers_add_up_to_the_models() -> None:
    structure = _traced(_convolutional)
    assert (
        sum(one.forward_flops for one in structure.layers)
        == structure.forward_flops_per_sample * 16
    )
    assert sum(one.parameters for one in structure.layers) == structure.parameters
    first = structure.layers[0]
    assert (first.kind, first.output_shape) == ("Conv2d", (16, 16, 8, 8))


def test_the_features_describe_the_models_size() -> None:
    assert _traced(_convolutional, batch_size=16).features == {
        "conv_layers": 2,
        "filters": 40,
        "dense_layers": 2,
        "dense_widths": 50,
        "image_height": 8,
        "image_width": 8,
        "batch_size": 16,
    }


@pytest.mark.parametrize("quantity", ["flops", "bytes"])
def test_a_trace_at_one_batch_size_is_valid_at_another(quantity: str) -> None:
    small, large = _traced(_convolutional, batch_size=8), _traced(_convolutional, batch_size=64)
    for batch_size in (8, 24, 64):
        assert _total(small, quantity, batch_size) == pytest.approx(
            _total(large, quantity, batch_size)
        )


def test_adams_memory_has_parameters_gradients_and_two_moments() -> None:
    adam, sgd = _traced(_dense, optimizer="adamw"), _traced(_dense, optimizer="sgd")
    assert (
        4.0 <= adam.peak_memory_bytes.fixed / adam.parameter_bytes < 6.0
    )  # and two temporaries of the largest
    assert sgd.peak_memory_bytes.fixed < adam.peak_memory_bytes.fixed - 1.5 * adam.parameter_bytes


def test_activations_and_peak_memory_grow_with_the_batch() -> None:
    structure = _traced(_convolutional)
    kept = 4 * (
        16 * 64 * 2 + 24 * 64
    )  # at least the results of the two convolutions and the normalisation
    assert structure.activation_bytes_per_sample >= kept
    assert structure.peak_memory_bytes.per_sample >= structure.activation_bytes_per_sample * 0.9


def test_double_precision_moves_twice_the_bytes() -> None:
    single, double = _traced(_convolutional), _traced(_convolutional, precision="fp64")
    assert double.parameter_bytes == 2 * single.parameter_bytes
    assert _total(double, "bytes", 16) == pytest.approx(
        2 * _total(single, "bytes", 16), rel=0.03
    )  # not the indices


def test_a_model_that_reads_its_data_is_traced_by_real_steps_and_the_structure_says_so() -> None:
    structure = _traced(_Branching, batch_size=32)
    assert structure.method == "real step"
    assert structure.batch_size == 32
    assert structure.forward_flops_per_sample == 2 * 64 * 10


class _Sized(nn.Module):
    """Has one more operation from 32 samples on, and parameters far larger than activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.Linear(4096, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = self.layers(images)
        return outputs if len(images) < 32 else 2 * outputs


def test_if_operations_depend_on_the_batch_size_persistent_memory_does_not_grow_with_it() -> None:
    sized, usual = (
        _traced(build, batch_size=16, optimizer="sgd")
        for build in (_Sized, lambda: _Sized().layers)
    )
    held = sized.parameter_bytes
    for batch_size in (16, 64, 256):
        in_proportion = held + (peak_bytes(sized, 16) - held) * batch_size / 16
        assert (
            0.99 * peak_bytes(usual, batch_size)
            <= peak_bytes(sized, batch_size)
            <= 1.01 * in_proportion
        )


def test_a_model_that_reads_values_while_it_is_built_can_be_traced() -> None:
    def build() -> nn.Module:
        rates = [one.item() for one in torch.linspace(0, 0.1, 3)]
        return nn.Sequential(nn.Flatten(), nn.Dropout(rates[1]), nn.Linear(64, 10))

    structure = _traced(build)
    assert structure.method == "fake tensors"
    assert structure.parameters == 64 * 10 + 10


def test_recurrent_layers_are_not_elementwise_operations() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(images.squeeze(1))[0][:, -1])

    families = {one.kind: one.family for one in _traced(Recurrent).trace}
    assert families["aten.mkldnn_rnn_layer"] == families["aten.mkldnn_rnn_layer_backward"] == "rnn"


def test_a_model_too_large_for_this_machine_is_traced_without_memory() -> None:
    width = 1_000_000
    structure = _traced(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, width))
    )
    assert structure.parameters == 64 * width + width + width * width + width
    assert structure.peak_memory_bytes.fixed > 4 * structure.parameters * 4


def test_a_compiled_model_is_named_as_its_source_names_it() -> None:
    def compiled() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.ReLU()), nn.Linear(4, 3))
        inner[0].compile()
        return torch.compile(inner)  # type: ignore[return-value]

    built = build(ModelDefinition(compiled, None, None), {})
    assert [name for name, _ in built.named_modules()] == ["", "0", "1", "2"]
    assert list(built.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(2, dtype=torch.complex64), "parameter w is complex64, .*view_as_complex"),
        (torch.ones(2).to(torch.float8_e5m2), "parameter w is float8_e5m2; allowed: float32"),
        (torch.ones(2).to_sparse(), r"w is of layout sparse_coo \(float32\)"),
        (None, None),
    ],
)
def test_parameters_that_can_not_be_trained_are_refused_by_name(
    tensor: torch.Tensor | None, says: str
) -> None:
    model = nn.Linear(2, 2)
    if tensor is None:
        model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        require_trainable(model)
        return
    model.w = nn.Parameter(tensor)
    with pytest.raises(BadInput, match=says):
        require_trainable(model)


def test_fewer_outputs_than_classes_are_refused() -> None:
    with pytest.raises(BadInput, match="returns 5 outputs, but the data has 10 classes"):
        _traced(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))


def test_reading_a_structure_loads_no_torch() -> None:
    document = _traced(_convolutional).model_dump_json()
    code = """
import sys
from trainwright.estimator.structure import Structure
structure = Structure.model_validate_json(sys.stdin.read())
assert "torch" not in sys.modules and "numpy" not in sys.modules
sys.stdout.write(structure.model_dump_json())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=document, capture_output=True, text=True, check=True
    )
    assert done.stdout == document


def test_the_phases_of_autograd_are_recorded_for_each_micro_batch_of_two_steps() -> None:
    what = TrainingStepSpec(
        ModelDefinition(_dense, None, None), {}, IMAGES, {"name": "sgd"}, accumulation=2
    )
    lifetimes = trace(what, 16).lifetimes
    assert lifetimes is not None
    assert lifetimes.graphs is not None
    places = [place for graph in lifetimes.graphs for place in graph]
    assert places == sorted(places)
    assert [graph[0] < len(lifetimes.start) for graph in lifetimes.graphs] == [
        True,
        True,
        False,
        False,
    ]
    assert places[-1] <= len(lifetimes.start) + len(lifetimes.step)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_fake_steps_optimizer_operations_equal_those_of_a_real_step(
    optimizer: str,
) -> None:
    def built() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def branching() -> nn.Module:
        def look(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            assert inputs[0].sum().item() >= 0

        model = built()
        model.register_forward_pre_hook(look)
        return model

    fake, real = _traced(built, optimizer=optimizer), _traced(branching, optimizer=optimizer)
    assert (fake.method, real.method) == ("fake tensors", "real step")
    in_place = [
        {kind: count for kind, count in one.operations.items() if kind.endswith("_")}
        for one in (fake, real)
    ]
    assert in_place[0] == in_place[1]
    assert fake.idle_bytes == real.idle_bytes


def test_an_exception_in_a_models_code_is_reported_with_its_message_and_line() -> None:
    def build(error: Exception) -> nn.Module:
        raise error

    with pytest.raises(BadInput, match=r"raised MemoryError \(test_trace\.py, line \d+\)$"):
        _traced(lambda: build(MemoryError()))
    with pytest.raises(
        BadInput, match=r"raised ValueError: of no use \(test_trace\.py, line \d+\)$"
    ):
        _traced(lambda: build(ValueError("of no use")))
