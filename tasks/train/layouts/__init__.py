"""How a rank trains the layers of a layout that are not summed as gradients.

Each strategy is a module with its equations: `late_multiply`, `sharded`, `averaging`. A rank's
`LayoutWork` holds those of its layout.
"""
