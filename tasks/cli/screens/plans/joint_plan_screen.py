"""Shows joint plans to a person, in a table that fits 80 columns."""

from __future__ import annotations

from trainwright.tasks.allocate.plan.device_counts import as_text, device_counts
from trainwright.tasks.cli.screens.console import table
from trainwright.tasks.cli.screens.plans.plan_screen import medians, show_held
from trainwright.tasks.cli.screens.quantities import ENERGIES, TIMES, column, headed
from trainwright.tasks.runs.artefacts.plan import JointPlan
from trainwright.tasks.units import plain


def show_joint(joint: JointPlan) -> None:
    """The joint plan of several jobs: when each runs, on which devices."""
    jobs = joint.jobs
    unit, texts = column(
        [value for one in jobs for value in (one.starts_s, one.ends_s, one.deadline_s)], TIMES
    )
    energy, energies = headed("energy", [medians(one.predicted)[1] for one in jobs], ENERGIES)
    together, (total,) = column([joint.energy_j], ENERGIES)
    less = ""
    if joint.search != "exact" and joint.gap is not None:
        less = f": at most {plain(100 * joint.gap, 2)} % less is possible"
    rows = [
        (
            str(one.global_batch_size),
            *texts[3 * place : 3 * place + 3],
            energies[place],
            "SLIPS" if one.slips else "",
            f"{one.job}: {as_text(device_counts(one.devices))}",
        )
        for place, one in enumerate(jobs)
    ]
    times = (f"starts\n{unit}", f"ends by\n{unit}", f"deadline\n{unit}")
    table(
        f"{len(jobs)} jobs, {total} {together} together ({joint.search}{less})",
        ("batch", *times, energy, "", "job: devices"),
        rows,
        right=(0, 1, 2, 3, 4),
    )
    show_held(joint.held)
