"""The tiers as Lightning's ranks: how their processes start, and what they agree on.

No process group is opened: barrier, broadcast and the like run over the links between the tiers.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_hiertrain.launching import Launcher
from lightning_hiertrain.log_folders import asks_for_log_folder
from lightning_hiertrain.session import Session
from lightning_hiertrain.transport.collectives import Collectives
from lightning_hiertrain.transport.network import Network


class TierProcesses(ParallelStrategy):
    """The part of the strategy that any way of training across tiers would share."""

    _tiers: tuple[str, ...]
    _tier_of_rank: tuple[str, ...]
    _network: Network | None = None
    _collectives: Collectives | None = None
    _session: Session | None = None
    _num_nodes = 1
    _failed_process: tuple[int, int] | None = None
    _log_folder: str | None = None
    """Rank 0's `trainer.log_dir`."""

    @property
    def session(self) -> Session:
        """This tier's part in the run.

        Raises:
            RuntimeError: Before the run has begun.
        """
        if self._session is None:
            raise RuntimeError(
                "the tiers meet when the Trainer starts to fit, validate, test or predict"
            )
        return self._session

    # Processes and ranks

    @property
    def root_device(self) -> torch.device:
        """The accelerator of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Machines that the Trainer was told of."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def world_size(self) -> int:
        """What Lightning and the user's code see: the work of one process."""
        return 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Says that one process reads all the data."""
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._check_world_size(self.num_nodes * self.num_processes)
        if self.local_rank >= self.num_processes:
            raise MisconfigurationException(
                f"this is process number {self.local_rank + 1} on this machine, and "
                f"`Trainer(devices={self.num_processes}, num_nodes={self.num_nodes})` expects "
                f"{self.num_processes}; with all tiers on one machine use "
                f"`Trainer(devices={len(self._tiers)})`, else start one process on each machine"
            )
        self._launcher = Launcher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            report=self._note_failed_process,
        )

    def _note_failed_process(self, rank: int, code: int) -> None:
        """Ends the wait for a tier whose process, started by this one, has failed."""
        self._failed_process = (rank, code)
        if self._network is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._network.give_up(self._tiers[rank], f"its process has ended with {how}")

    def _check_world_size(self, world_size: int) -> None:
        if world_size != len(self._tiers):
            raise MisconfigurationException(
                f"`HierTrainStrategy` has {len(self._tiers)} tiers {self._tiers} and the Trainer "
                f"starts {world_size} process(es); use `Trainer(devices={len(self._tiers)})` on "
                f"one machine, or `Trainer(devices=1, num_nodes={len(self._tiers)})` with one "
                "process on each machine"
            )

    def set_world_ranks(self) -> None:
        """Tells Lightning which rank this process has."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # Collectives: local while user code runs on one tier alone

    @property
    def _is_local(self) -> bool:
        if self._session is None or self._session.calls.is_user_code_alone:
            return True
        return self._is_interrupted

    @property
    def _is_interrupted(self) -> bool:
        """Whether an error has ended the run: the other tiers no longer take part in anything."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.interrupted

    def barrier(self, name: str | None = None) -> None:
        """Waits for all tiers."""
        if self._collectives is not None and not self._is_local:
            self._collectives.barrier(name)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Returns the object of rank `src` on all tiers."""
        if asks_for_log_folder(inspect.currentframe().f_back):  # type: ignore[union-attr]
            return obj if self.is_global_zero else cast(TBroadcast, self._log_folder or obj)
        if self._collectives is None or self._is_local:
            return obj
        result: TBroadcast = self._collectives.broadcast(obj, self._tier_of_rank[src])
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the value as it is: the tiers have one and the same, as one process has."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensor as it is, as on one process."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agrees on a decision."""
        if self._collectives is None or self._is_local:
            return decision
        return self._collectives.all(decision) if all else self._collectives.any(decision)
