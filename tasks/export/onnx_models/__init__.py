"""Exports to ONNX, in float and with 8-bit integers.

Start with `onnx_kind`. In the sandbox, `onnx_process` converts the model (`torch_to_onnx`), joins
to it how a row's columns become its inputs and its outputs a class (`whole_graph`), quantises it if
asked (`int8_quantise`), and compares the result with torch (`torch_reference`, `onnx_compare`).
"""
