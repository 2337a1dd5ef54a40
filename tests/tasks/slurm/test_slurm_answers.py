"""How the answers of Slurm's commands are read."""

from __future__ import annotations

from datetime import datetime

import pytest

from trainwright.tasks.slurm import slurm_answers

MUNGE = """squeue: error: If munged is up, restart with --num-threads=10
squeue: error: Munge encode failed: Failed to access "/run/x": No such file (Did you start munged?)
squeue: error: slurm_send_node_msg: auth_g_create: REQUEST_JOB_INFO has authentication error
slurm_load_jobs error: Protocol authentication error
"""


@pytest.mark.parametrize(
    ("stderr", "says", "refused"),
    [
        (
            "srun: error: invalid partition specified: nope\n"
            "srun: error: Unable to allocate resources: Invalid partition name specified\n",
            "Invalid partition name specified",
            True,
        ),
        (
            "srun: error: Memory specification can not be satisfied\nsrun: error: Unable to "
            "allocate resources: Requested node configuration is not available\n",
            "Requested node configuration is not available",
            True,
        ),
        (
            "srun: error: Unable to allocate resources: Invalid account or account/partition "
            "combination specified\n",
            "Invalid account or account/partition combination specified",
            True,
        ),
        (
            MUNGE,
            'Munge encode failed: Failed to access "/run/x": No such file (Did you start munged?)',
            False,
        ),
        (
            "srun: error: Unable to allocate resources: Unable to contact slurm controller "
            "(connect failure)\n",
            "Unable to contact slurm controller (connect failure)",
            False,
        ),
        (
            "slurmstepd: error: *** STEP 3.0 ON h1 CANCELLED AT 2026-01-01T00:00:00 DUE TO "
            "PREEMPTION ***\nsrun: Force Terminated StepId=3.0\n",
            "Slurm ended its job: preemption",
            False,
        ),
        ("srun: job 3 queued and waiting for resources\n", "", False),
    ],
)
def test_errors_of_slurm_are_one_line(stderr: str, says: str, refused: bool) -> None:
    assert slurm_answers.why(stderr) == says
    assert slurm_answers.is_refusal(says) == refused


@pytest.mark.parametrize(
    ("due", "expected"),
    [
        ("", True),
        ("DUE TO PREEMPTION ", True),
        ("DUE TO TIME LIMIT ", True),
        ("DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ", False),
    ],
)
def test_a_step_that_slurm_ends_is_told_from_one_of_a_failed_node(due: str, expected: bool) -> None:
    line = f"slurmstepd-h3: error: *** STEP 3.0 ON h3 CANCELLED AT 2026-01-01T00:00:00 {due}***\n"
    assert slurm_answers.takes_back(f"srun: job 3 has been allocated\n{line}") == expected
    assert not slurm_answers.takes_back("")


def test_the_queue_says_which_jobs_wait_and_which_never_start() -> None:
    found = slurm_answers.waiting(
        "1|PENDING|2026-01-01T12:00:00|Resources|a\n2|RUNNING|2026-01-01T00:00:00|None|b\n"
        "3|PENDING|N/A|BadConstraints|c\n4|PENDING|N/A|ReqNodeNotAvail, UnavailableNodes:h2|d\n"
        "5|PENDING|N/A|QOSMaxCpuPerJobLimit|e\n6|PENDING|2027-01-01T00:00:00|Priority|f\n"
        "7|PENDING|N/A|Job's account not permitted to use this partition (a allows x not y)|g\n"
        "8|RUNNING|2026-01-01T00:00:00|None|x|y\nz\n",
        datetime(2026, 1, 1),
    )
    assert [name for name, job in found.items() if job.state in slurm_answers.WAITING] == [
        *("a", "c", "d", "e", "f", "g")
    ]
    assert [name for name, job in found.items() if job.never_starts] == ["c", "e", "g"]
    # a job without a time limit is before f, and counts as one of a year
    assert [found[one].starts for one in "adf"] == ["2026-01-01T12:00:00", "", ""]
    assert found["a"].in_words == "in Slurm's queue: job 1 (Resources)"
    assert found["d"].reason == "ReqNodeNotAvail, UnavailableNodes:h2"
