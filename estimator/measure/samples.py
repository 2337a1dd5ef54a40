"""The file in which a running calibration keeps its samples, so that an interrupted one continues.

It has one JSON object per line. A process may be killed while it writes, so an incomplete last line
is removed before anything is added. There is one writer at a time, because
`trainwright.tasks.estimate.calibrate` holds a lock. Loads no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from trainwright.estimator.errors import BadInput
from trainwright.estimator.fit.step_fit import StepSample


class KeptSamples:
    """The samples in a file and the seconds that they took.

    Drops samples of another setting (machine, code, threads).

    :param path: the file; None keeps the samples in memory only
    :param setting: what samples must share to be used together
    """

    def __init__(self, path: Path | None, setting: str) -> None:
        self.samples: list[StepSample] = []
        self.elapsed_s = 0.0
        self._path, self._setting = path, setting
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        complete = 0
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                document = json.loads(line)
                if not line.endswith(b"\n") or document["setting"] != self._setting:
                    break
                sample = StepSample.model_validate(document["sample"])
                elapsed_s = float(document["elapsed_s"])
            except (ValueError, KeyError, TypeError):
                break
            self.samples.append(sample)
            self.elapsed_s = elapsed_s
            complete += len(line)
        with path.open("r+b") as file:
            file.truncate(complete)

    def append(self, sample: StepSample, elapsed_s: float) -> None:
        """Add a sample; `elapsed_s` are the seconds of all samples together.

        Raises BadInput if the file can't be written.
        """
        self.samples.append(sample)
        self.elapsed_s = elapsed_s
        if self._path is not None:
            line = {
                "setting": self._setting,
                "elapsed_s": elapsed_s,
                "sample": sample.model_dump(mode="json"),
            }
            try:
                with self._path.open("ab") as file:
                    file.write(json.dumps(line).encode() + b"\n")
            except OSError as error:
                raise BadInput(f"{self._path}: can't be written ({error.strerror})") from None

    def discard(self) -> None:
        """Delete the file, once its samples are in a calibration or useless."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
