"""One tier's part in a run: everything between Lightning's hooks and the links.

The strategy translates Lightning's calls into these methods; all tiers call them in the same order.
What a tier does in each depends on its role in the schedule in force.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hiertrain.dealing import Dealing
from lightning_hiertrain.drift import DriftWatch, NoWatch
from lightning_hiertrain.execution import DealtBatch, Feed, MiniBatch, Owner, PrefixWorker, Replicas
from lightning_hiertrain.execution.settings import TrainedSettings
from lightning_hiertrain.members import Members, Replan
from lightning_hiertrain.mirror import Mirror, quietly
from lightning_hiertrain.mirrored_calls import MirroredCalls
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.rows import batch_leaves
from lightning_hiertrain.placing import placed
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule, Share
from lightning_hiertrain.showing import Showing
from lightning_hiertrain.step_times import StepTimes
from lightning_hiertrain.transport.collectives import Collectives
from lightning_hiertrain.transport.network import Network
from lightning_hiertrain.transport.observing import Doing

log = logging.getLogger(__name__)

_SEVERAL_CLOSURES = (
    "the optimizer evaluates the training step several times in one update, which "
    "`HierTrainStrategy` cannot divide; use one that evaluates it once, such as SGD or Adam"
)


class Session:
    """One tier's part in a run.

    Args:
        network: The links of this tier.
        collectives: Operations over them.
        module: The user's module.
        data_tier: The tier that has the data.
        overlap: Whether transfers overlap with computation.
        keeps_inputs: Whether raw samples stay on the data tier.
        writer: The tier that writes checkpoints and logs.
        replan: Makes a schedule for the tiers left when one has died; `None` if that ends the run.
        after: The run before this one over the same links. What it sent last, such as samples of a
            mini-batch that was never trained on, may still be there.
    """

    def __init__(
        self,
        network: Network,
        collectives: Collectives,
        module: LightningModule,
        *,
        data_tier: str,
        overlap: bool,
        keeps_inputs: bool,
        writer: str,
        replan: Replan | None,
        after: Session | None = None,
    ) -> None:
        self.network = network
        self.collectives = collectives
        self.data_tier = data_tier
        self.keeps_inputs = keeps_inputs
        self._overlap = overlap
        self.mirror = Mirror(module)
        self.calls = MirroredCalls(network, self.mirror)
        self.replicas = Replicas(network, module, data_tier)
        self.chain: LayerChain | None = None
        self.schedule: Schedule | None = None
        self.mini_batch: MiniBatch | None = None
        self.module = module
        self._feed = Feed(network, data_tier, keeps_inputs=keeps_inputs)
        self._dealing = Dealing(
            network, self.calls, self._feed, data_tier=data_tier, place=self.placed
        )
        self.showing = Showing(network, self._feed, data_tier=data_tier, place=self.placed)
        """Who gives hooks the mini-batches that they read."""
        if after is not None:
            self.calls.count, self._dealing.count = after.calls.count, after._dealing.count
        self.members = Members(
            network, (data_tier, writer), replan=replan, on_lost=self._make_up_for
        )
        self._owner: Owner | None = None
        self._prefix: PrefixWorker | None = None
        self._pending: Schedule | None = None
        self._synchronises = True
        self._exchanged = False
        self._at_boundary = True
        self._optimizers: list[Optimizer] = []
        self._parameters: dict[str, Parameter] | None = None
        self.weights_may_change = False
        """Whether hooks may change weights between steps."""
        self._times = StepTimes()
        self.watch: DriftWatch | NoWatch = NoWatch()
        """Who notices that tiers or links have changed and plans anew."""

    @property
    def tier(self) -> str:
        return self.network.tier

    @property
    def is_data_tier(self) -> bool:
        return self.tier == self.data_tier

    @property
    def owner(self) -> str:
        """The tier that has all weights, ends steps and runs validation."""
        return self.schedule.owner if self.schedule is not None else self.data_tier

    @property
    def overlaps(self) -> bool:
        """Whether transfers overlap with computation."""
        return self._overlap

    @property
    def changes_schedule(self) -> bool:
        """Whether another schedule is about to be put in force."""
        return self._pending is not None

    @property
    def evaluator(self) -> str:
        """The tier that runs the steps of validation, test and prediction."""
        return self.data_tier if self.keeps_inputs else self.owner

    @property
    def is_owner(self) -> bool:
        return self.tier == self.owner

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The module's parameters; from the first step on there are no others."""
        return self._parameters or dict(self.module.named_parameters())

    @property
    def measured_step_seconds(self) -> float | None:
        """Median time of a step under the schedule in force, without the first few."""
        return self._times.median_seconds

    def knows(self, module: LightningModule) -> bool:
        """Whether a module is the one that was traced, with the same parameters."""
        known, now = self.parameters, dict(module.named_parameters())
        return known.keys() == now.keys() and all(now[name] is x for name, x in known.items())

    # Batches

    def use_chain(self, chain: LayerChain) -> None:
        """Takes the chain of layers that the data tier has traced."""
        self.chain = chain
        self._parameters = dict(self.module.named_parameters())
        self._owner = Owner(
            self.network,
            chain,
            self.module,
            rows_of=lambda tier, of: self.placed(self._feed.rows_of(tier, of, chain)),
            without_trace=self.mirror.without_trace,
        )
        self._prefix = PrefixWorker(self.network, chain, self.module, overlap=self._overlap)

    def whole_step_on(self, tier: str, num_samples: int) -> Schedule:
        """Returns the schedule by which one tier does everything."""
        assert self.chain is not None
        return Schedule(
            owner=tier, shares={tier: Share(num_layers=len(self.chain), num_samples=num_samples)}
        )

    def expect_rates(self, profile: Profile) -> None:
        """Notes what the links carry by a profile; batches are packed by that."""
        others = [tier for tier in profile.tiers if tier != self.data_tier]
        self._feed.expect_rates({t: profile.bytes_per_second(self.data_tier, t) for t in others})

    def bytes_of_leaves(self, batch: Any, bytes_per_second: float) -> list[int]:
        """Returns how many bytes each tensor of a batch takes on a link of that rate."""
        return self._feed.bytes_of_leaves(batch_leaves(batch), bytes_per_second)

    def adopt(self, schedule: Schedule) -> None:
        """Puts a schedule in force after the next update; all tiers call this together."""
        self._pending = schedule

    def begin_training_batch(
        self,
        batch: DealtBatch | None,
        next_batch: Callable[[], DealtBatch | None],
        optimizers: list[Optimizer],
        precision: Any,
    ) -> MiniBatch:
        """Deals out or receives a mini-batch.

        Between two optimizer steps it switches to a new schedule first. With overlap the samples of
        the next mini-batch leave at once, to travel during this step.

        Args:
            batch: On the data tier the whole mini-batch, elsewhere `None`.
            next_batch: Returns the one after it, on the data tier, if that is known.
            optimizers: The run's optimizers, whose state moves if the owner changes.
            precision: The precision plugin, whose state moves likewise.
        """
        assert self.chain is not None
        self._optimizers = optimizers
        with self.network.together():
            if self._at_boundary:
                self._times.begin()
                self._begin_step(batch, optimizers, precision)
            else:
                self._dealing.announce(batch, self.schedule, self.chain, None)
            self._at_boundary = False
            self._exchanged = False
            assert self.schedule is not None
            ahead = next_batch if self._overlap else _none
            self.mini_batch = self._dealing.deal(batch, self.schedule, self.chain, ahead)
        dealt = self.mini_batch
        self.watch.batch_dealt(dealt.num_samples, is_divided=dealt.is_divided)
        return dealt

    def _begin_step(
        self, batch: DealtBatch | None, optimizers: list[Optimizer], precision: Any
    ) -> None:
        """Announces the first mini-batch of a step; puts another schedule in force if need be."""
        assert self.chain is not None
        schedule, news = self._pending or self.schedule, None
        changes = self._tell_changes()
        if self.is_data_tier:
            assert schedule is not None
            news = self.members.news(schedule)
            if news is None and self._pending is None:
                news = self.watch.news()
            if news is not None and news["schedule"] is not None:
                schedule = Schedule.from_dict(news["schedule"])
        news = self._dealing.announce(batch, schedule, self.chain, news)
        heard = self.members.hear(news)
        self.watch.hear(news)
        pending, self._pending = heard or self._pending, None
        self._receive_changes(changes)
        if pending is not None:
            self._switch(pending, optimizers, precision)

    def shown_batch(self, batch: DealtBatch | None) -> Any:
        """Returns the whole mini-batch on tiers where hooks read it, else `None`."""
        assert self.mini_batch is not None
        return self.showing.show(batch, self.mini_batch.index, self.owner)

    def begin_evaluation_batch(
        self, batch: Any, weight: int | None, dataloader_idx: int
    ) -> tuple[Any, int | None]:
        """Brings a batch of validation, test or prediction to the tier that evaluates.

        Returns:
            The batch, on that tier and the data tier, and its size by Lightning's rules.
        """
        self.watch.disturb()
        self.settle()
        self.replicas.bring(self.evaluator)
        to_all = self.showing.evaluation_to_all
        batch, weight = self._dealing.evaluate(batch, weight, self.evaluator, to_all=to_all)
        return self.placed(batch, dataloader_idx), weight

    def placed(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Moves what has arrived of a batch to this tier's accelerator."""
        return batch if self.is_data_tier else placed(batch, self.module, dataloader_idx)

    # Steps

    def run_training_step(self, step: Callable[[Any], Any]) -> Any:
        """Runs this tier's part of the forward pass.

        Args:
            step: The user's training step, called with what this tier sees of the batch.

        Returns:
            What the step returned on the owner; its tensors are detached on the other tiers.
        """
        mini_batch = self.mini_batch
        assert mini_batch is not None
        assert self._owner is not None
        assert self._prefix is not None
        if self.is_owner:
            owner = self._owner
            own = mini_batch.owner_rows
            return self.calls.lead(
                lambda: owner.forward(mini_batch, step),
                mini_batch.weight,
                own_samples=own,
                at_once=False,  # the others wait for gradients or the update
            )
        if mini_batch.batch is not None:
            self._prefix.forward(mini_batch, quietly(self.module, step))
        return self.calls.follow("end its training step", self.owner)

    def run_backward(self, backward: Callable[[Callable[[], None]], Any]) -> Any:
        """Runs this tier's part of the backward pass.

        Args:
            backward: On the owner, carries the loss back; it calls its argument once the gradients
                are there.

        Returns:
            What `backward` returned, `None` on other tiers.
        """
        if self.is_owner:
            assert self._owner is not None
            with self._owner.in_backward():
                return backward(self._end_backward)
        assert self._prefix is not None
        assert self.schedule is not None
        sends = self.schedule if self._synchronises else None
        self._prefix.backward(self.owner, sends=sends)
        self._exchange()
        return None

    def run_optimizer_step(
        self, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]
    ) -> Any:
        """Runs forward, backward and the update.

        Args:
            closure: Forward and backward.
            step: On the owner, runs a closure and the optimizer.
        """
        assert self.schedule is not None
        assert self.chain is not None
        assert self.mini_batch is not None
        assert self._owner is not None
        assert self._prefix is not None
        index, observer = self.mini_batch.index, self.network.observer
        settings = TrainedSettings(self.parameters, self._optimizers)

        def whole_closure() -> Any:
            if self._exchanged:
                raise MisconfigurationException(_SEVERAL_CLOSURES)
            result = closure()
            self._exchange()
            if observer is not None and self.is_owner:
                observer.begin(("optimizer", ""))
            return result

        if self.is_owner:
            before = settings.now()
            with self.mirror.record(self.mini_batch.weight, surrounding=True) as recording:
                with Doing(self.network, "other"):
                    result = step(whole_closure)
                if observer is not None:
                    observer.step_ended()
                payload = recording.payload(ends=True)
            by_hand = self._owner.by_hand.stepped()
            payload |= {"settings": settings.changed_since(before), "by_hand": by_hand}
            self.calls.tell(f"{index}/update", payload)
            with Doing(self.network, "weights"):
                self._owner.return_weights(index, self.schedule, by_hand)
        else:
            result = whole_closure()
            self._prefix.forget()
            payload = self.network.receive(
                self.owner, f"{index}/update", operation="end its update"
            )
            self.mirror.replay(payload)
            settings.adopt(payload["settings"])
            by_hand = payload["by_hand"]
            if self.tier in self.schedule.prefix_workers:
                self._prefix.expect_weights(index, self.schedule)
            if observer is not None:
                observer.step_ended()
        self._feed.forget(index)
        trained = {name for name, p in self.parameters.items() if p.requires_grad}
        self.replicas.stepped(self.schedule, self.chain, trained)
        self.replicas.changed_by_hand(by_hand)
        if not self.weights_may_change:
            self.replicas.release()
        self._at_boundary = True
        self._times.end()
        self.watch.step_ended()
        return result

    def accumulate(self, accumulates: bool) -> None:
        """Says whether gradients only add up for now, to be exchanged with a later mini-batch."""
        self._synchronises = not accumulates

    def settle(self) -> None:
        """Waits for weights that are on their way to this tier."""
        if self._prefix is not None:
            self._prefix.settle()

    # States

    def bring_weights(self, *tiers: str) -> None:
        """Gives tiers the newest weights and buffers; all tiers call this together."""
        self.watch.disturb()
        self.settle()
        if self.weights_may_change:
            self.replicas.trust_owner_only()
        elif self._owner is not None:
            tag, owner = self.calls.tag("changed by hand"), self.replicas.owner
            if self.tier == owner:
                by_hand = self._owner.by_hand.changed()
                self.calls.tell(tag, by_hand)
            else:
                by_hand = self.network.receive(owner, tag, operation="hear of changed weights")
            self.replicas.changed_by_hand(by_hand)
        for tier in tiers:
            self.replicas.bring(tier)

    def bring_weights_everywhere(self) -> None:
        """Gives all tiers the newest weights and buffers."""
        self.bring_weights(*self.network.topology.names)

    def end_training(self) -> None:
        """Gives all tiers all that the owner has."""
        self.bring_weights_everywhere()
        self.calls.spread_attributes(self.owner)

    def close(self) -> None:
        """Takes back changes to the user's objects and ends what runs beside training."""
        self.mirror.close()
        self.replicas.close()
        self.watch.close()

    # Inside

    def _make_up_for(self, lost: str) -> None:
        """Sends the owner the rows of a tier that has died; the links' thread must not wait."""
        if self.is_data_tier:
            threading.Thread(target=self._feed.make_up_for, args=(lost,), daemon=True).start()

    def _tell_changes(self) -> str | None:
        """Tells the prefix workers which weights hooks have changed since the update.

        Returns:
            The message's tag, `None` if there is none.
        """
        workers = self.schedule.prefix_workers if self.schedule is not None else ()
        if not (workers and self.weights_may_change and self._times.count):
            return None
        tag = self.calls.tag("changed weights")
        if self.is_owner:
            assert self._owner is not None
            self.network.send_to(workers, tag, self._owner.edited(), control=None)
        return tag

    def _receive_changes(self, tag: str | None) -> None:
        if tag is None:
            return
        assert self.schedule is not None
        assert self._prefix is not None
        if self.tier in self.schedule.prefix_workers:
            edited = self.network.receive(self.owner, tag, operation="receive changed weights")
            self._prefix.correct(edited)

    def _end_backward(self) -> None:
        assert self._owner is not None
        self._owner.finish_backward()
        self._exchange()

    def _exchange(self) -> None:
        """Brings the prefix workers' gradients to the owner, once, if the optimizer steps next."""
        if self._exchanged or not self._synchronises:
            return
        self._exchanged = True
        assert self.mini_batch is not None
        assert self._owner is not None
        assert self._prefix is not None
        index, schedule = self.mini_batch.index, self.mini_batch.schedule
        with Doing(self.network, "gradients"):
            if self.is_owner:
                self._owner.finish_backward()
                self._owner.add_gradients(index, schedule)
            elif self.tier in schedule.prefix_workers:
                self._prefix.send_gradients(index, schedule)

    def _switch(self, schedule: Schedule, optimizers: list[Optimizer], precision: Any) -> None:
        assert self.chain is not None
        self.settle()
        if self.weights_may_change:
            self.replicas.trust_owner_only()
        new = schedule.owner
        self.members.need(self.replicas.owner, new)
        if new != self.owner:
            self.calls.spread_attributes(self.owner)
        self.replicas.bring(new)
        for worker in schedule.prefix_workers:
            names = self.chain.parameters_through(schedule.shares[worker].num_layers)
            self.replicas.bring(worker, names, with_buffers=True)
        self.replicas.move_ownership(new, optimizers, precision)
        self.members.need(new)
        assert self._owner is not None
        self._owner.by_hand.begin()
        self.schedule = schedule
        involved = {self.data_tier, new, *schedule.prefix_workers}
        self.calls.onlookers = frozenset(self.network.topology.names) - involved
        self._times.clear()
        self.watch.switched(schedule)
        for parameter in self.module.parameters():
            parameter.grad = None


def _none() -> None:
    return None
