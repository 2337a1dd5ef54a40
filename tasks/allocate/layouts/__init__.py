"""Layouts of parallelism: which are permitted, what memory they need, which one a plan gets.

`permitted` refuses layouts, `choose` compares them by simulated steps, `planning` gives a plan its
layout. Arithmetic on values.
"""
