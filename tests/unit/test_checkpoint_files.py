"""A checkpoint has its name when it is whole, and never before."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_hiertrain import HierTrainStrategy
from lightning_hiertrain.checkpoint_files import WholeFiles

OLD, NEW = {"weights": torch.zeros(4)}, {"weights": torch.ones(200_000)}


@contextmanager
def short_files(most_bytes: int) -> Iterator[None]:
    """Lets no file of this process grow further, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("name", ["last.ckpt", "new.ckpt"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, name: str) -> None:
    files = WholeFiles()
    files.save_checkpoint(OLD, tmp_path / "last.ckpt")
    match = rf"{name} could not be written \(.*the last good checkpoint is .*last.ckpt"
    with short_files(10_000), pytest.raises(OSError, match=match):
        files.save_checkpoint(NEW, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert files.load_checkpoint(tmp_path / "last.ckpt")["weights"].tolist() == [0, 0, 0, 0]
    files.remove_checkpoint(tmp_path / "last.ckpt")
    with short_files(10_000), pytest.raises(OSError, match="this run has no other checkpoint"):
        files.save_checkpoint(NEW, tmp_path / name)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_process_killed_while_it_writes_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "folder" / "last.ckpt"
    WholeFiles().save_checkpoint(OLD, path)
    pid = os.fork()
    if pid == 0:
        setattr(os, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        Path.replace = os.replace  # type: ignore[method-assign]
        WholeFiles().save_checkpoint(NEW, path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert torch.load(path)["weights"].numel() == 4
    left = [other.suffix for other in path.parent.iterdir() if other != path]
    assert left == [".part"]


def test_a_checkpoint_that_cannot_be_packed_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle"):
        WholeFiles().save_checkpoint({"a": lambda: None}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_files_are_as_open_to_others_as_lightning_s_and_may_lie_elsewhere(tmp_path: Path) -> None:
    WholeFiles().save_checkpoint(OLD, tmp_path / "a.ckpt")
    TorchCheckpointIO().save_checkpoint(OLD, tmp_path / "b.ckpt")
    assert (tmp_path / "a.ckpt").stat().st_mode == (tmp_path / "b.ckpt").stat().st_mode
    remote = WholeFiles()
    remote.save_checkpoint(OLD, "memory://folder/a.ckpt")
    assert remote.load_checkpoint("memory://folder/a.ckpt")["weights"].tolist() == [0, 0, 0, 0]
    with pytest.raises(TypeError, match="storage_options"):
        remote.save_checkpoint(OLD, tmp_path / "c.ckpt", storage_options={})


def test_the_strategy_writes_whole_files_unless_the_user_brings_a_plugin(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        pass

    assert type(HierTrainStrategy().checkpoint_io) is WholeFiles
    own = Own()
    assert HierTrainStrategy(checkpoint_io=own).checkpoint_io is own
    for given, expected in ((AsyncCheckpointIO(), WholeFiles), (AsyncCheckpointIO(own), Own)):
        strategy: Any = HierTrainStrategy(checkpoint_io=given)
        assert strategy.checkpoint_io is given
        assert type(given.checkpoint_io) is expected
        strategy.checkpoint_io.save_checkpoint(OLD, tmp_path / "a.ckpt")
        strategy.checkpoint_io.teardown()
        assert torch.load(tmp_path / "a.ckpt")["weights"].numel() == 4
