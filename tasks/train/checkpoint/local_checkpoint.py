"""A checkpoint in a folder of this machine, read tensor by tensor or by rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.train.checkpoint.fence import STATE
from trainwright.tasks.train.checkpoint.files import MODEL, OPTIMIZER, parsed

if TYPE_CHECKING:
    import torch


class LocalCheckpoint:
    """Its state and tensors; those of all shards together. Its files stay as long as it is used."""

    def __init__(self, folder: Path) -> None:
        """Raises CorruptArtefact if two shards have the same tensor."""
        from safetensors import safe_open

        self.state = parsed((folder / STATE).read_bytes())
        self._files: dict[str, dict[str, Any]] = {MODEL: {}, OPTIMIZER: {}}
        """the opened file of each tensor"""
        for file in sorted(self.state.sha256):
            opened: Any = safe_open(folder / file, framework="pt")
            whole = self._files[MODEL if file.startswith("model") else OPTIMIZER]
            if twice := whole.keys() & set(opened.keys()):
                raise CorruptArtefact(f"{folder / file}: another shard has {min(twice)!r} too")
            whole.update(dict.fromkeys(opened.keys(), opened))

    def names(self, file: str) -> list[str]:
        """The names of a file's tensors."""
        return [*self._files[file]]

    def shape(self, file: str, name: str) -> list[int]:
        """The shape of a tensor."""
        return list(self._files[file][name].get_slice(name).get_shape())

    def kind(self, file: str, name: str) -> str:
        """The name of a tensor's type in torch."""
        return str(self.rows(file, name, 0, 0).dtype).removeprefix("torch.")

    def tensor(self, file: str, name: str) -> torch.Tensor:
        """A tensor."""
        found: torch.Tensor = self._files[file][name].get_tensor(name)
        return found

    def rows(self, file: str, name: str, begin: int, end: int) -> torch.Tensor:
        """The rows [begin, end) of a tensor; only these are read."""
        found: torch.Tensor = self._files[file][name].get_slice(name)[begin:end]
        return found

    def tensors(self, file: str) -> dict[str, torch.Tensor]:
        """All tensors of a file."""
        return {name: self.tensor(file, name) for name in self._files[file]}
