"""Computes answers: in limited processes, with bounded concurrency, and cached.

`answers` computes, within `bounded_work`. `model_tracer` traces models in an `async_sandbox`.
"""
