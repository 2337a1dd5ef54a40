"""Tests on a GPU: `make test-gpu`. Other selections do not collect them, and none skips.

A machine without a GPU of a known type fails each of them. They print figures: run with -s.
"""
