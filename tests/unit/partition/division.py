"""Divides a batch by hand, with `Passage` alone, and compares it with the whole one.

This is the independent check of the tracer's cuts: it shares no code with the tracer's own proof
and leaves chance alone, so that the models it is used on must be deterministic.
"""

import copy

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_hiertrain.partition import CutReached, Passage, trace_step
from lightning_hiertrain.partition.rows import batch_leaves, with_leaves


class Steps:
    """A module, a step on it and a batch, each run on a copy with the same weights."""

    def __init__(self, module, step, batch):
        self.module, self.step, self.batch = module, step, batch
        self.chain = trace_step(lambda rows: step(module, rows), module, fresh(batch))

    @property
    def names(self):
        return [layer.name for layer in self.chain]

    def check_every_cut(self, owns=(2, 0), workers=3):
        for depth in range(1, len(self.chain) + 1):
            for own in owns:
                self.check({depth: workers}, own)

    def check(self, workers, own):
        """Compares values and gradients for `workers` (rows by depth) and the owner's own rows."""
        total = own + sum(workers.values())
        batch = self.rows(slice(0, total))
        module = copy.deepcopy(self.module)
        whole = flat(self.step(module, fresh(batch)))
        backward(whole)
        expected = gradients(module)

        module = copy.deepcopy(self.module)  # all tiers' gradients meet in one copy
        activations, start = {}, own
        for depth, count in workers.items():
            activations[depth] = self.prefix(module, batch, depth, slice(start, start + count))
            start += count
        received = {
            depth: output.detach().clone(memory_format=torch.contiguous_format)
            for depth, output in activations.items()
        }
        for depth, output in activations.items():
            received[depth].requires_grad_(output.requires_grad)
        divided = flat(self.owner(module, batch, received, workers, own))
        backward(divided)
        for depth, output in activations.items():
            if received[depth].grad is not None:
                output.backward(received[depth].grad)
        where = f"cuts {workers}, own {own}"
        for x, y in zip(whole, divided, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5, msg=lambda m: f"{where}: {m}")
        for name, gradient in gradients(module).items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-3, atol=1e-5,
                msg=lambda m, name=name: f"{where}, {name}: {m}",
            )  # fmt: skip

    def rows(self, part):
        return self.map_rows(self.batch, lambda leaf: leaf[part].clone())

    def map_rows(self, batch, function):
        leaves = [
            leaf if shape is None else function(leaf)
            for leaf, shape in zip(batch_leaves(batch), self.chain.leaf_shapes, strict=True)
        ]
        return with_leaves(batch, leaves)

    def prefix(self, module, batch, depth, part):
        """Returns what crosses the cut; the worker has its own rows of everything."""
        rows = self.map_rows(batch, lambda leaf: leaf[part].clone())

        def leave(output):
            raise CutReached(output)

        passage = Passage(
            self.chain,
            batch_leaves(rows),
            num_rows=part.stop - part.start,
            taps={depth: leave},
        )
        try:
            with passage:
                self.step(module, rows)
        except CutReached as cut:
            return cut.output
        raise AssertionError(f"the step did not reach the cut after layer {depth}")

    def owner(self, module, batch, received, workers, own):
        first = min(workers)
        leaves = []
        for i, (leaf, shape) in enumerate(
            zip(batch_leaves(batch), self.chain.leaf_shapes, strict=True)
        ):
            if shape is None or self.chain.is_read_behind(i, first):
                leaves.append(leaf.clone())
            else:
                leaves.append(leaf[: max(own, 1)].clone())
        rows = with_leaves(batch, leaves)

        def joined(depth, before):
            def tap(output):
                dim = self.chain[depth - 1].output.dim
                return torch.cat((output, received[depth]), dim) if before else received[depth]

            return tap

        taps, behind, count = {}, {}, own
        for depth in sorted(workers):
            taps[depth] = joined(depth, count)
            count += workers[depth]
            behind[depth] = count
        passage = Passage(
            self.chain, batch_leaves(rows), num_rows=own, taps=taps, rows_behind=behind
        )
        with passage:
            result = self.step(module, rows)
        passage.check_complete()
        return result


def fresh(batch):
    return apply_to_collection(batch, torch.Tensor, torch.clone)


def flat(result):
    tensors = []
    apply_to_collection(result, torch.Tensor, tensors.append)
    return tensors


def backward(values):
    loss = next((value for value in values if value.requires_grad), None)
    if loss is not None:
        loss.backward()


def gradients(module):
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
    }
