"""Parts of models, built without memory for the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import FAMILIES, source_of

from trainwright.estimator.precision import cast
from trainwright.estimator.trace import source
from trainwright.tasks.train.layouts.cut_tensors import is_blank
from trainwright.tasks.train.rank.partial_build import PartialBuild, named_tensors

Build = Callable[[], torch.nn.Module]


def seeded(make: Build) -> Build:
    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        return make()

    return build


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_has_the_values_of_the_whole_model(tmp_path: Path, family: str) -> None:
    (tmp_path / "net.py").write_text(source_of(family))
    definition = source.load(tmp_path, "net.py")
    build = seeded(lambda: cast(source.build(definition, {}), "bf16"))
    whole = named_tensors(build())
    drawn = torch.get_rng_state()
    parts = PartialBuild(build, least_bytes=256)
    for held in (sorted(whole)[::2], sorted(whole)[1::2]):
        found = named_tensors(parts.part(held))
        assert not parts.is_whole
        assert torch.equal(torch.get_rng_state(), drawn)
        assert list(found) == list(whole)
        for name, one in found.items():
            assert (one.shape, one.dtype) == (whole[name].shape, whole[name].dtype)
            if name in held or not one.dim():
                assert torch.equal(one, whole[name]), name
            else:
                assert one.untyped_storage().nbytes() <= 16


class Layers(torch.nn.Module):
    """Of two large layers; the second begins with a copy of the first, or reads its numbers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
        self.beside = torch.randn(256, 256)
        if way == "copied":
            self.two.load_state_dict(self.one.state_dict())
        elif way == "read":
            with torch.no_grad():
                self.two.weight.mul_(float(self.one.weight.std()))


def test_what_a_held_tensor_is_computed_from_is_built_too() -> None:
    build = seeded(lambda: Layers("copied"))
    whole, parts = build(), PartialBuild(build)
    part = parts.part(["two.weight"])
    assert not parts.is_whole
    assert torch.equal(part.two.weight, whole.one.weight)  # type: ignore[union-attr, arg-type]
    assert torch.equal(part.beside, whole.beside)  # type: ignore[arg-type]
    assert is_blank(part.one.weight)  # type: ignore[union-attr, arg-type]


def test_a_model_that_reads_its_numbers_is_built_whole(caplog: pytest.LogCaptureFixture) -> None:
    build = seeded(lambda: Layers("read"))
    whole, parts = build(), PartialBuild(build)
    part = parts.part(["two.weight"])
    assert parts.is_whole
    assert "builds the whole model, to keep a part of it: " in caplog.text
    assert torch.equal(part.two.weight, whole.two.weight)  # type: ignore[union-attr, arg-type]
    assert is_blank(part.one.weight)  # type: ignore[union-attr, arg-type]


def test_tensors_that_are_not_held_take_no_memory_while_it_is_built() -> None:
    made: list[int] = []

    class Noted(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(512, 512)
            made.append(0 if self.weight.device.type == "meta" else self.weight.nbytes)

    build = seeded(lambda: torch.nn.Sequential(*(Noted() for _ in range(4))))
    PartialBuild(build).part(["2.weight", "2.bias"])
    assert made == [0, 0, 0, 0, 0, 0, 512 * 512 * 4, 0]
