"""Answers that need computing: in processes with limits, bounded in number, and cached.

`answers` computes, within `bounded_work`. `model_tracer` traces models in an `async_sandbox`.
"""
