"""States on disk: what comes back is what was given, and what is damaged is never loaded."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.local import checkpoint
from slime_plugin.run.folder import RunFolder

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]

tensors = st.builds(
    lambda shape, dtype, seed: (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 250
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
names = st.text(max_size=5) | st.integers(-5, 5)
states = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | tensors,
    lambda parts: (
        st.lists(parts, max_size=3) | st.lists(parts, max_size=3).map(tuple) | st.dictionaries(names, parts, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """With the same types everywhere."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(x) is type(y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(states)
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_state(state, Path(folder), 3)
        assert same(checkpoint.load_state(Path(folder), 3), state)


def test_parameters_that_share_memory_come_back(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    state = {"a": whole[:6].view(2, 3).T, "b": whole, "c": whole}
    checkpoint.save_state(state, tmp_path, 0)
    assert same(checkpoint.load_state(tmp_path, 0), state)


def test_what_is_neither_tensor_nor_plain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state \.a\.0 is a PosixPath"):
        checkpoint.save_state({"a": [Path()]}, tmp_path, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "other"])
def test_a_damaged_shard_says_what_to_remove(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "00004"
    checkpoint.save_state({"a": torch.arange(1000.0), "b": 1}, folder, 0)
    checkpoint.save_state({"c": torch.arange(1000.0), "d": 1}, tmp_path / "other", 0)
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "other":
        shutil.copyfile(tmp_path / "other" / name, path)
    elif damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
    with pytest.raises(MemoryWalkerError) as caught:
        checkpoint.load_state(folder, 0)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{folder}/rank-00000: cannot be read (")
    assert line.endswith(f"; remove {folder} to resume from the checkpoint before it")


def save(folder: RunFolder, iteration: int, keep: int) -> None:
    folder.weights(iteration).mkdir(parents=True)
    (folder.weights(iteration) / "config.json").write_text("{}")
    checkpoint.save_state({"iteration": iteration}, checkpoint.draft_of(folder, iteration), 0)
    checkpoint.finish(folder, iteration, {"iteration": iteration}, keep)
    checkpoint.drop_weights(folder, [*checkpoint.checkpoints(folder), iteration])


def test_old_checkpoints_and_their_weights_go_once_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 2, keep=2)
    save(folder, 4, keep=2)
    draft = checkpoint.draft_of(folder, 6)
    checkpoint.save_state({"iteration": 6}, draft, 0)  # and then it is killed
    assert checkpoint.checkpoints(folder) == [2, 4]
    assert folder.versions() == [2, 4]
    save(folder, 6, keep=2)
    assert checkpoint.checkpoints(folder) == [4, 6]
    assert folder.versions() == [4, 6]
    assert [checkpoint.load_state(folder.checkpoints / f"{i:05d}", 0)["iteration"] for i in (4, 6)] == [4, 6]
    states = [json.loads((folder.checkpoints / f"{i:05d}" / "state.json").read_text()) for i in (4, 6)]
    assert [state["iteration"] for state in states] == [4, 6]
    save(folder, 7, keep=1)
    assert checkpoint.checkpoints(folder) == folder.versions() == [7]
    assert [path.name for path in folder.checkpoints.iterdir()] == ["00007"]


def test_a_checkpoint_that_is_being_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 1, keep=1)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 2, keep=1)
    monkeypatch.undo()
    assert checkpoint.checkpoints(folder) == [2]
    save(folder, 3, keep=2)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["00002", "00003"]


def test_random_numbers_go_on_where_they_were() -> None:
    state = checkpoint.rng_state()
    drawn = torch.rand(5)
    checkpoint.set_rng_state(state)
    assert torch.equal(torch.rand(5), drawn)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something else")
    with pytest.raises(MemoryWalkerError, match=r"file/00001: cannot be written: Not a directory; free some space"):
        checkpoint.save_state({}, tmp_path / "file" / "00001", 0)


def test_nothing_in_a_checkpoint_is_code(tmp_path: Path) -> None:
    checkpoint.save_state({"a": (1, [torch.ones(2)])}, tmp_path, 0)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    assert json.loads((tmp_path / "rank-00000.json").read_text())["dict"][0][0] == "a"
