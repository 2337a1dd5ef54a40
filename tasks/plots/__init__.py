"""Parts of plots as SVG: `plot_axis` maps values to pixels, `plot_shapes` are lines and texts."""
