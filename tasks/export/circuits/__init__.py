"""The kind `rtl`: small models as Verilog that is right bit for bit.

Read `to_circuit` first, then `integer_model`: what a circuit computes.
"""
