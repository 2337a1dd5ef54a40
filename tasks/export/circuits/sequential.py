"""The circuit with one multiplier: it reads weights from a memory, one product with every clock.

All layers run on the same few cells. A layer is a row of a table: how many outputs there are, how
many products each has, and by how much addresses move after each of them. Values lie in one memory,
where each layer's input has its own area with its padding, which stays 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - only what exports imports this module, in functions

from trainwright.tasks.export.circuits.integer_model import IntegerLayer, IntegerModel, LayerShape
from trainwright.tasks.export.circuits.pipelined import input_bits

MODULE = "sequential"
_CYCLES_PER_OUTPUT = 7
"""besides its products: fetching the bias, starting, emptying the multiplier, rounding, writing"""


@dataclass(frozen=True)
class SequentialCircuit:
    """The files of the circuit, its widths and its memories."""

    files: tuple[Path, ...]
    memories: tuple[Path, ...]
    """read by the Verilog at start, by name, from the current folder"""
    top: str
    input_bits: int
    value_bits: int
    weight_bits: int
    sum_bits: int
    values: int
    weights: int
    biases: int
    products: int
    latency_cycles: int
    """from the first input value to the last output value"""
    style = "sequential"


@dataclass(frozen=True)
class _Area:
    """Where a layer's input lies in the memory, with its padding."""

    base: int
    row: int
    plane: int
    start: int
    """address of the first value that is not padding"""

    @classmethod
    def of(cls, base: int, inputs: tuple[int, int, int], padding: tuple[int, int]) -> _Area:
        row = inputs[2] + 2 * padding[1]
        plane = row * (inputs[1] + 2 * padding[0])
        return cls(base, row, plane, base + padding[0] * row + padding[1])


def write_sequential(model: IntegerModel, folder: Path) -> SequentialCircuit:
    """`sequential.v` and its memories' contents in `folder`."""
    areas = list(_areas(model))
    size = areas[-1].base + model.layers[-1].shape.inputs[0] * areas[-1].plane
    ranges = model.ranges()
    value_bits = max(_signed_bits(*one) for one in ranges[:-1])
    sums = [layer.sum_range(*ranges[at]) for at, layer in enumerate(model.layers)]
    sum_bits = 1 + max(_signed_bits(*one) for one in sums)
    words = [int(one) for layer in model.layers for one in layer.weights.reshape(-1)] or [0]
    biases = [int(one) for layer in model.layers for one in layer.bias]
    weight_bits = max(2, *(_signed_bits(one, one) for one in words))
    folder.mkdir(parents=True, exist_ok=True)
    memories = folder / "sequential_weights.hex", folder / "sequential_biases.hex"
    for path, numbers, bits in zip(memories, (words, biases), (weight_bits, sum_bits), strict=True):
        path.write_text("".join(f"{one % (1 << bits):x}\n" for one in numbers))
    stages = list(_stages(model, areas))
    text = _TEXT
    values = {
        "INPUT_BITS": input_bits(model),
        "INPUT_SIGNED": int(model.low < 0),
        "VALUE_BITS": value_bits,
        "WEIGHT_BITS": weight_bits,
        "SUM_BITS": sum_bits,
        "VALUES": size,
        "VALUE_ADDRESS_BITS": _address_bits(size),
        "WEIGHTS": len(words),
        "WEIGHT_ADDRESS_BITS": _address_bits(len(words)),
        "BIASES": len(biases),
        "BIAS_ADDRESS_BITS": _address_bits(len(biases)),
        "STAGE_BITS": max(1, len(model.layers).bit_length()),
        "LAST_STAGE": len(model.layers),
        "COUNTER_BITS": max(_counter_bits(model), 1),
        "START_WRITE": areas[0].start,
        "TABLE": "\n".join(_table(stage, one) for stage, one in enumerate(stages)),
    }
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    path = folder / f"{MODULE}.v"
    path.write_text(text)
    products = sum(layer.shape.count * layer.shape.terms for layer in model.layers)
    outputs = sum(layer.shape.count for layer in model.layers)
    return SequentialCircuit(
        (path,),
        memories,
        MODULE,
        input_bits(model),
        value_bits,
        weight_bits,
        sum_bits,
        size,
        len(words),
        len(biases),
        products,
        int(np.prod(model.input_shape)) + products + _CYCLES_PER_OUTPUT * outputs,
    )


def _areas(model: IntegerModel) -> Iterator[_Area]:
    base = 0
    for layer in model.layers:
        area = _Area.of(base, layer.shape.inputs, layer.shape.padding)
        yield area
        base += layer.shape.inputs[0] * area.plane


def _signed_bits(low: int, high: int) -> int:
    return max(low, high, -low - 1, -high - 1).bit_length() + 1


def _address_bits(size: int) -> int:
    return max(1, (size - 1).bit_length())


def _counter_bits(model: IntegerModel) -> int:
    sizes = [model.input_shape, *(layer.shape.outputs for layer in model.layers)]
    sizes += [(layer.shape.inputs[0], *layer.shape.kernel) for layer in model.layers]
    return max(max(one) - 1 for one in sizes).bit_length()


def _stages(model: IntegerModel, areas: list[_Area]) -> Iterator[dict[str, Any]]:
    """The rows of the table: stage 0 writes the inputs, stage n is layer n."""
    last = len(model.layers)
    for stage in range(last + 1):
        layer = model.layers[stage - 1] if stage else None
        shape = layer.shape if layer else None
        outputs = shape.outputs if shape else model.input_shape
        row: dict[str, Any] = {
            "out_last": [one - 1 for one in outputs],
            "term_last": [0, 0, 0],
            "read_steps": [0, 0],
            "window_steps": [0, 0, 0],
            "read_start": 0,
            "layer": layer,
        }
        if stage and shape:
            area = areas[stage - 1]
            row |= _reading(shape, area)
        area = areas[stage] if stage < last else _Area.of(0, (1, 1, 1), (0, 0))
        _, height, width = outputs
        row["write_steps"] = [
            area.row - (width - 1),
            area.plane - (height - 1) * area.row - (width - 1),
        ]
        row["next_write"] = areas[stage + 1].start if stage + 1 < last else areas[0].start
        row["next_read"] = areas[stage].base if stage < last else 0
        yield row


def _reading(shape: LayerShape, area: _Area) -> dict[str, Any]:
    """How far addresses move: within a window, and from window to window."""
    high, wide = shape.kernel
    down, right = shape.stride
    _, rows, columns = shape.outputs
    back = (rows - 1) * down * area.row + (columns - 1) * right
    return {
        "term_last": [0 if shape.by_channel else shape.inputs[0] - 1, high - 1, wide - 1],
        "read_steps": [
            area.row - (wide - 1),
            area.plane - (high - 1) * area.row - (wide - 1),
        ],
        "window_steps": [
            right,
            down * area.row - (columns - 1) * right,
            (area.plane if shape.by_channel else 0) - back,
        ],
    }


def _table(stage: int, row: dict[str, Any]) -> str:
    layer: IntegerLayer | None = row["layer"]
    pools = layer is not None and layer.shape.kind == "max-pool"
    shift = layer.shift if layer else 0
    half = 1 << (shift - 1) if shift else 0
    ends = layer is not None and layer.low is not None and layer.high is not None
    low = layer.low if layer and ends else None
    relu = bool(layer and layer.relu and not ends)
    lines = [
        "channel_last = {}; y_last = {}; x_last = {};".format(*row["out_last"]),
        "c_last = {}; ky_last = {}; kx_last = {};".format(*row["term_last"]),
        "row_step = {}; plane_step = {};".format(*row["read_steps"]),
        "right_step = {}; down_step = {}; channel_step = {};".format(*row["window_steps"]),
        "write_row = {}; write_plane = {};".format(*row["write_steps"]),
        f"next_write = {row['next_write']}; next_read = {row['next_read']};",
        f"largest = {int(pools)};",
        f"rounded = (sum + ({half})) >>> {shift};" if shift else "rounded = sum;",
    ]
    if ends and layer:
        lines.append(
            f"result = rounded < ({low}) ? ({low}) : rounded > ({layer.high}) ? ({layer.high}) : "
            "rounded;"
        )
    else:
        lines.append("result = rounded < 0 ? 0 : rounded;" if relu else "result = rounded;")
    body = "\n".join(f"            {line}" for line in lines)
    return f"        {stage}: begin\n{body}\n        end"


_TEXT = """// One multiplier and adder for all layers. A vector comes in as values, one with every
// clock in which input_valid and input_ready are 1; outputs come out one by one, with output_valid.
`timescale 1ns / 1ps

module sequential (
    input clk,
    input rst,
    input input_valid,
    input [@INPUT_BITS@ - 1:0] input_value,
    output input_ready,
    output reg output_valid,
    output reg signed [@SUM_BITS@ - 1:0] output_value
);
    localparam LOAD = 0, FETCH = 1, START = 2, MULTIPLY = 3, EMPTY = 4, ROUND = 5, WRITE = 6;

    // Block memories. A value read while another is written is never used.
    (* ram_style = "block", no_rw_check *)
    reg signed [@VALUE_BITS@ - 1:0] values [0:@VALUES@ - 1];
    (* rom_style = "block" *)
    reg signed [@WEIGHT_BITS@ - 1:0] weights [0:@WEIGHTS@ - 1];
    (* rom_style = "block" *)
    reg signed [@SUM_BITS@ - 1:0] biases [0:@BIASES@ - 1];
    integer index;
    initial begin
        for (index = 0; index < @VALUES@; index = index + 1) values[index] = 0;
        $readmemh("sequential_weights.hex", weights);
        $readmemh("sequential_biases.hex", biases);
    end

    reg [2:0] state;
    reg [@STAGE_BITS@ - 1:0] stage;
    reg [@COUNTER_BITS@ - 1:0] channel, y, x, c, ky, kx;
    reg [@VALUE_ADDRESS_BITS@ - 1:0] window, read_address, write_address;
    reg [@WEIGHT_ADDRESS_BITS@ - 1:0] weight_start, weight_address;
    reg [@BIAS_ADDRESS_BITS@ - 1:0] bias_address;

    // The table of the stages: stage 0 takes the inputs, each other one is a layer.
    reg [@COUNTER_BITS@ - 1:0] channel_last, y_last, x_last, c_last, ky_last, kx_last;
    reg [@VALUE_ADDRESS_BITS@ - 1:0] row_step, plane_step, right_step, down_step, channel_step;
    reg [@VALUE_ADDRESS_BITS@ - 1:0] write_row, write_plane, next_write, next_read;
    reg largest;
    reg signed [@SUM_BITS@ - 1:0] sum, rounded, result, kept;
    always @* begin
        case (stage)
@TABLE@
        default: begin
            channel_last = 0; y_last = 0; x_last = 0; c_last = 0; ky_last = 0; kx_last = 0;
            row_step = 0; plane_step = 0; right_step = 0; down_step = 0; channel_step = 0;
            write_row = 0; write_plane = 0; next_write = 0; next_read = 0;
            largest = 0; rounded = sum; result = sum;
        end
        endcase
    end

    // Memories, then the multiplier, then the adder: three clocks from an address to the sum.
    reg signed [@VALUE_BITS@ - 1:0] value;
    reg signed [@WEIGHT_BITS@ - 1:0] weight;
    reg signed [@SUM_BITS@ - 1:0] bias;
    reg signed [@VALUE_BITS@ + @WEIGHT_BITS@ - 1:0] product;
    reg value_there, product_there;
    wire loading = state == LOAD && input_valid;
    wire writing = loading || (state == WRITE && stage != @LAST_STAGE@);
    wire signed [@VALUE_BITS@ - 1:0] input_extended =
        {{@VALUE_BITS@{(@INPUT_SIGNED@ != 0) & input_value[@INPUT_BITS@ - 1]}}, input_value};
    wire signed [@VALUE_BITS@ - 1:0] written = loading ? input_extended : kept;
    assign input_ready = state == LOAD;
    always @(posedge clk) begin
        value <= values[read_address];
        weight <= weights[weight_address];
        bias <= biases[bias_address];
        if (writing) values[write_address] <= written;
        if (largest) product <= value;
        else product <= value * weight;
    end

    wire last_x = x == x_last, last_y = y == y_last, last_channel = channel == channel_last;
    wire last_kx = kx == kx_last, last_ky = ky == ky_last, last_c = c == c_last;
    wire advance = loading || state == WRITE;
    always @(posedge clk) begin
        output_valid <= 0;
        value_there <= state == MULTIPLY;
        product_there <= value_there;
        if (product_there) begin
            if (!largest) sum <= sum + product;
            else if (product > sum) sum <= product;
        end
        case (state)
            FETCH: state <= START;
            START: begin
                sum <= bias;
                if (largest) sum <= {1'b1, {(@SUM_BITS@ - 1){1'b0}}};
                read_address <= window;
                weight_address <= weight_start;
                c <= 0; ky <= 0; kx <= 0;
                state <= MULTIPLY;
            end
            MULTIPLY: begin
                if (!largest) weight_address <= weight_address + 1;
                kx <= last_kx ? 0 : kx + 1;
                read_address <= read_address + (!last_kx ? 1 : !last_ky ? row_step : plane_step);
                if (last_kx) ky <= last_ky ? 0 : ky + 1;
                if (last_kx && last_ky) begin
                    c <= c + 1;
                    if (last_c) state <= EMPTY;
                end
            end
            EMPTY: if (!value_there && !product_there) state <= ROUND;
            ROUND: begin
                kept <= result;
                state <= WRITE;
            end
            WRITE: begin
                state <= FETCH;
                if (stage == @LAST_STAGE@) begin
                    output_valid <= 1;
                    output_value <= kept;
                end
            end
            default: ;
        endcase
        if (advance) begin
            x <= last_x ? 0 : x + 1;
            window <= window + (!last_x ? right_step : !last_y ? down_step : channel_step);
            write_address <= write_address + (!last_x ? 1 : !last_y ? write_row : write_plane);
            if (last_x) y <= last_y ? 0 : y + 1;
            if (last_x && last_y) begin
                channel <= channel + 1;
                if (state == WRITE) begin
                    weight_start <= weight_address;
                    bias_address <= bias_address + 1;
                end
                if (last_channel) begin
                    channel <= 0;
                    window <= next_read;
                    write_address <= next_write;
                    stage <= stage + 1;
                    state <= FETCH;
                    if (stage == @LAST_STAGE@) begin
                        stage <= 0;
                        state <= LOAD;
                        weight_start <= 0;
                        bias_address <= 0;
                    end
                end
            end
        end
        if (rst) begin
            state <= LOAD;
            stage <= 0;
            x <= 0; y <= 0; channel <= 0; kx <= 0; ky <= 0; c <= 0;
            window <= 0;
            write_address <= @START_WRITE@;
            weight_start <= 0;
            weight_address <= 0;
            bias_address <= 0;
            sum <= 0;
            value_there <= 0;
            product_there <= 0;
            output_valid <= 0;
        end
    end
endmodule
"""
