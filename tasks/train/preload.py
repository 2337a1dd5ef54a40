"""Has a host's data ready before ranks start there: `python -m trainwright.tasks.train.preload ASKED.json`, started by `node`.

Looks where the data may lie, fetching what lies in S3, and says where it is found with the content that was validated:
`found` with a path, or `missing` with why. What the launcher has copied goes into the cache by its content's checksum.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.job import DataSpec
from trainwright.tasks.settings import settings
from trainwright.tasks.sources import content_sha256, localized
from trainwright.tasks.train.channel import RankChannel


def cache_of(sha256: str) -> Path:
    """The folder under which this machine keeps a copy of data with this content."""
    return settings().home / "data" / sha256


def look(spec: DataSpec, sha256: str) -> str:
    """The data's place on this machine: a path, or a builtin's name. Raises TrainwrightError where it is missing."""
    kept = cache_of(sha256)
    places = [spec.uri, *(str(path) for path in (kept.iterdir() if kept.is_dir() else ()))]
    why: list[TrainwrightError] = []
    for uri in places:
        try:
            place = localized(spec.model_copy(update={"uri": uri}))
            if content_sha256(place) == sha256:
                return place.uri
            why.append(BadInput("it has another content than was validated"))
        except TrainwrightError as error:
            why.append(error)
        except (OSError, ValueError) as error:
            why.append(BadInput(f"it can't be read: {error}"))
    raise why[0]


def keep(copied: Path, sha256: str) -> None:
    """Move what was copied here into the cache."""
    folder = cache_of(sha256)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        copied.parent.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another launch was first, with the same content
            raise


def main(asked: dict[str, Any]) -> None:
    """Say what came of it to the launcher."""
    channel = RankChannel()
    progress.listen(lambda event: channel.send("fetched", bytes=event["bytes"], of=event["of"]))
    try:
        if asked["copied"] is not None:
            keep(Path(asked["copied"]), asked["sha256"])
        channel.send("found", uri=look(DataSpec.model_validate(asked["spec"]), asked["sha256"]))
    except TrainwrightError as error:
        channel.send("missing", error=error.document())
    except OSError as error:
        traceback.print_exc()
        channel.send("missing", error=BadInput(f"it can't be kept: {error}").document())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
