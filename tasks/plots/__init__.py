"""Parts of plots as SVG, in the colours of the service's page.

`plot_axis` maps values to pixels, `plot_shapes` are lines and texts, `colours` has both themes.
"""
