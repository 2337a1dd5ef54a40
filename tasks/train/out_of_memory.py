"""Memory that runs out on a rank's device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed

_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
)


class OutOfMemory(TrainingFailed):
    """What a rank works on does not fit into its device's memory.

    Its share of the batch (`batch_size`), or with `layer`, the rows of all ranks in that layer. For
    a stage of a pipeline it is `final`: another share of the batch would not help.
    """

    kind = "out_of_memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch's allocators or the GPU driver ran out of memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


@contextlib.contextmanager
def joint_work(layer: str) -> Iterator[None]:
    """Raise OutOfMemory naming the layer if memory for the rows of all ranks runs out inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"the rows of all ranks in layer {layer} do not fit into memory", layer=layer
        ) from None
