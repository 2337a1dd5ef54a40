"""Finds or stages a training's data on a host before ranks start there.

The agent runs it: `python -m trainwright.tasks.train.hosts.stage_data REQUEST.json`. It looks where
the data may be, downloads what is in S3, and compares the content with the validated content. It
answers `found` with a path, or `missing` with the reason. Data that the launcher has copied moves
into the cache, named by its checksum.
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
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.train.channel import RankChannel


def cache_of(sha256: str) -> Path:
    """The folder in which this machine caches data with this content."""
    return Settings.from_environment().home / "data" / sha256


def look(spec: DataSpec, sha256: str) -> str:
    """The data's path on this machine, or a builtin's name. Raises TrainwrightError if missing."""
    return _first_whole(spec, sha256, [spec.uri, *_kept(sha256)])


def keep(spec: DataSpec, copied: Path, sha256: str) -> None:
    """Move copied data into the cache. Raises BadInput if its content is not the expected one."""
    _first_whole(spec, sha256, [str(copied)])
    folder = cache_of(sha256)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        copied.parent.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        try:  # another launch was faster: use its copy if it is whole
            _first_whole(spec, sha256, _kept(sha256))
        except TrainwrightError:
            folder.rename(copied.parent.with_name("damaged"))  # removed with the work folder
            copied.parent.rename(folder)


def _kept(sha256: str) -> list[str]:
    folder = cache_of(sha256)
    return [str(path) for path in folder.iterdir()] if folder.is_dir() else []


def _first_whole(spec: DataSpec, sha256: str, uris: list[str]) -> str:
    """The first place with this content. If none has it, raises the error of the first place."""
    why: list[TrainwrightError] = []
    for uri in uris:
        try:
            place = localized(spec.model_copy(update={"uri": uri}), Settings.from_environment())
            if content_sha256(place) == sha256:
                return place.uri
            why.append(BadInput("its content differs from the validated content"))
        except TrainwrightError as error:
            why.append(error)
        except (OSError, ValueError) as error:
            why.append(BadInput(f"it can't be read: {error}"))
    raise why[0] if why else BadInput("no data found")


def main(asked: dict[str, Any]) -> None:
    """Stage the data and report the result to the launcher."""
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
        channel.send("missing", error=BadInput(f"it can't be stored: {error}").document())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
