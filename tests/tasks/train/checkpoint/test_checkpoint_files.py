"""The files of checkpoints: safetensors, shards and copies of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from trainwright.tasks.errors import CorruptArtefact, TrainingFailed
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import sha256
from trainwright.tasks.train.checkpoint import fence, tensors
from trainwright.tasks.train.checkpoint import files as checkpoint
from trainwright.tasks.train.checkpoint.shards import merged

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SHAPES = st.lists(st.integers(0, 5), max_size=3)
MADE = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), SHAPES),
    max_size=8,
)


def make(shapes: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return {
        name: torch.randint(0, 2, shape, generator=generator).to(dtype)
        for name, (dtype, shape) in shapes.items()
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name], other[name])
        for name in one
    )


def file_of(one: dict[str, torch.Tensor]) -> bytes:
    """The safetensors file of these tensors."""
    return b"".join(tensors.as_file(one))


@given(MADE)
def test_safetensors_reads_the_files(
    shapes: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    given_ = make(shapes)
    assert equal(load(file_of(given_)), given_)


@given(MADE, MADE, st.integers(1, 5))
def test_the_ranks_parts_cover_each_tensor_once_and_merge_to_one_file(
    model: dict[str, tuple[torch.dtype, list[int]]],
    optimizer: dict[str, tuple[torch.dtype, list[int]]],
    size: int,
) -> None:
    files = {"model": make(model), "optimizer": make(optimizer)}
    parts = [tensors.own_part(files, rank, size) for rank in range(size)]
    for file, whole in files.items():
        names = [name for part in parts for name in part.get(file, {})]
        assert sorted(names) == sorted(whole)
        assert names == list(whole)  # contiguous, in the order of the ranks
        if whole:
            shards = [file_of(part[file]) for part in parts if file in part]
            assert equal(load(merged(shards)), whole)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_no_part_exceeds_its_share_by_more_than_one_tensor(sizes: list[int], ranks: int) -> None:
    files = {
        "model": {str(n): torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    }
    for rank in range(ranks):
        own = sum(map(tensors.size_bytes, tensors.own_part(files, rank, ranks).values()))
        assert own <= sum(sizes) / ranks + max(sizes)


def test_shards_with_the_same_tensor_name_are_refused() -> None:
    shard = file_of({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="two tensors are named 'w'"):
        merged([shard, shard])


def test_shards_that_are_not_valid_safetensors_are_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    right = fence.claim(store, None)
    state = checkpoint.CheckpointState(step=1, epoch=0, split=[1])
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        right.put(f"checkpoints/step-00000001/{name}", b"\xff" * 40)
        state.sha256[name] = sha256(b"\xff" * 40)
    checkpoint.write_state(right, state, CheckpointPolicy())
    with pytest.raises(CorruptArtefact):
        checkpoint.whole_model(store, state)


def test_a_copy_keeps_the_values_and_gives_tied_weights_separate_memory() -> None:
    tied = torch.ones(3)
    half, scalar = torch.ones(2, dtype=torch.bfloat16), torch.tensor(2.0)
    wide = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given_ = {"a": tied, "b": tied, "scalar": scalar, "half": half, "wide": wide}
    copies = tensors.host_copies(given_)
    tied.fill_(7)
    found = load(file_of(copies))
    assert equal(found, {**given_, "a": torch.ones(3), "b": torch.ones(3)})
    assert load(file_of(given_))["a"].tolist() == load(file_of(given_))["b"].tolist() == [7, 7, 7]


def test_a_type_that_safetensors_cannot_store_is_named() -> None:
    with pytest.raises(TrainingFailed, match=r"w has the type torch\.complex128"):
        file_of({"w": torch.ones(1, dtype=torch.complex128)})


@pytest.mark.parametrize(
    "state",
    [
        {"exp_avg.1": torch.ones(2)},
        {"exp_avg.0": torch.ones(3)},
        {"exp_avg.x": torch.ones(2)},
        {"0": torch.ones(2)},
    ],
)
def test_an_optimizer_state_that_does_not_fit_the_parameters_is_refused(
    state: dict[str, torch.Tensor],
) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(TrainingFailed, match="does not fit the optimizer"):
        tensors.load_optimizer(optimizer, state)
