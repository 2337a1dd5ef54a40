"""The timeline of a planned step: what each rank computes and what is on the wire, over time.

`simulated_plan` plays a plan's step again, `lanes` turns a rank's spans into bars, `timeline_svg`
draws them. Arithmetic on values.
"""
