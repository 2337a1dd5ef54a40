"""Has a host's data ready before ranks start there: `python -m trainwright.tasks.train.hosts.stage_data ASKED.json`, by `node`.

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
from trainwright.tasks.data.sources import content_sha256, localized
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import DataSpec
from trainwright.tasks.train.channel import RankChannel


def cache_of(sha256: str) -> Path:
    """The folder under which this machine keeps a copy of data with this content."""
    return Settings.from_environment().home / "data" / sha256


def look(spec: DataSpec, sha256: str) -> str:
    """The data's place on this machine: a path, or a builtin's name. Raises TrainwrightError where it is missing."""
    return _first_whole(spec, sha256, [spec.uri, *_kept(sha256)])


def keep(spec: DataSpec, copied: Path, sha256: str) -> None:
    """Move what was copied here into the cache, where nothing but this content may lie. Raises BadInput for another content."""
    _first_whole(spec, sha256, [str(copied)])
    folder = cache_of(sha256)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        copied.parent.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        try:
            _first_whole(
                spec, sha256, _kept(sha256)
            )  # another launch was first, with the same content
        except TrainwrightError:
            folder.rename(copied.parent.with_name("damaged"))  # goes when the launch does
            copied.parent.rename(folder)


def _kept(sha256: str) -> list[str]:
    folder = cache_of(sha256)
    return [str(path) for path in folder.iterdir()] if folder.is_dir() else []


def _first_whole(spec: DataSpec, sha256: str, uris: list[str]) -> str:
    """The first of these places that has this content. Raises TrainwrightError: why the first has not."""
    why: list[TrainwrightError] = []
    for uri in uris:
        try:
            place = localized(spec.model_copy(update={"uri": uri}), Settings.from_environment())
            if content_sha256(place) == sha256:
                return place.uri
            why.append(BadInput("it has another content than was validated"))
        except TrainwrightError as error:
            why.append(error)
        except (OSError, ValueError) as error:
            why.append(BadInput(f"it can't be read: {error}"))
    raise why[0] if why else BadInput("there is nothing")


def main(asked: dict[str, Any]) -> None:
    """Say what came of it to the launcher."""
    channel = RankChannel()
    progress.listen(lambda event: channel.send("fetched", bytes=event["bytes"], of=event["of"]))
    try:
        spec = DataSpec.model_validate(asked["spec"])
        if asked["copied"] is not None:
            keep(spec, Path(asked["copied"]), asked["sha256"])
        channel.send("found", uri=look(spec, asked["sha256"]))
    except TrainwrightError as error:
        channel.send("missing", error=error.document())
    except OSError as error:
        traceback.print_exc()
        channel.send("missing", error=BadInput(f"it can't be kept: {error}").document())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
