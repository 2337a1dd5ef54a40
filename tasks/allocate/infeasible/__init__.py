"""Why no plan is feasible, and which limit would have to be how large.

Read `binding_limits` first: deadline, budget, windows; then `binding_memory` and `binding_link`.
"""
