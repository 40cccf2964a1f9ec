"""Which samples come when: permutations, repeats, and how processes and micro-batches share a batch."""

from __future__ import annotations

import pytest
import torch

from vision_longformer.data.order import Batching, Process, epoch_order


def test_order_is_a_permutation_that_changes_with_seed_and_epoch() -> None:
    orders = [epoch_order(100, seed, epoch, 10) for seed in (0, 1) for epoch in (0, 1)]
    assert all(torch.equal(order.sort().values, torch.arange(100)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert torch.equal(orders[0], epoch_order(100, 0, 0, 25))


def test_order_of_every_earlier_run() -> None:
    """PyTorch's permutation by the seed of epoch 3: BLAKE2b of ``(0, 'order', 3)``, see test_randomness."""
    seed = int.from_bytes(bytes.fromhex("0ab773f00dadd2e4"), "little") >> 1
    expected = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(epoch_order(10, 0, 3, 5), expected)


@pytest.mark.parametrize(("samples", "batch_size", "repeats"), [(24, 12, 3), (25, 8, 3), (10, 4, 2)])
def test_repeats(samples: int, batch_size: int, repeats: int) -> None:
    """An image is shown ``repeats`` times in one global batch or two, and each of as many processes has one copy."""
    order = epoch_order(samples, 0, 0, batch_size, repeats)
    assert len(order) == samples
    counts = order.bincount(minlength=samples).sort(descending=True).values.tolist()
    assert counts[: samples // repeats] == [repeats] * (samples // repeats)
    assert sum(count > 0 for count in counts) == -(-samples // repeats)
    share = batch_size // repeats
    for whole in order[: samples // batch_size * batch_size].split(batch_size):
        assert all(len(part.unique()) == len(part) for part in whole.split(share))


def test_copies_are_dealt_over_the_batch() -> None:
    """The first images of the permutation, each twice: a batch of four is a b a b, and two processes see both."""
    plain = epoch_order(8, 0, 0, 4).tolist()
    a, b, c, d = plain[:4]
    assert epoch_order(8, 0, 0, 4, repeats=2).tolist() == [a, b, a, b, c, d, c, d]


def test_processes_take_consecutive_parts_and_cut_them_into_micro_batches() -> None:
    """Batches of 12 over two processes in three parts each: micro-batches of two."""
    first, second = (Batching(12, 3, Process(rank, 2)) for rank in (0, 1))
    assert first.micro_batch_size == 2
    assert [first.positions(index) for index in range(4)] == [range(0, 2), range(2, 4), range(4, 6), range(12, 14)]
    assert [second.positions(index) for index in range(4)] == [range(6, 8), range(8, 10), range(10, 12), range(18, 20)]
    assert [first.micro_batches(samples) for samples in (12, 23, 24)] == [3, 3, 6]


def test_a_batch_that_three_processes_cannot_share_evenly() -> None:
    """Eight samples in three shares; two shares in three parts each; and in pairs."""
    uneven = [Batching(8, 1, Process(rank, 3)) for rank in range(3)]
    assert [part.positions(1) for part in uneven] == [range(8, 10), range(10, 13), range(13, 16)]
    assert [part.weight(1) for part in uneven] == [0.75, 1.125, 1.125]
    assert [part.micro_batch_size for part in uneven] == [3, 3, 3]
    first, second = (Batching(8, 3, Process(rank, 2)) for rank in (0, 1))
    assert [first.positions(index) for index in range(3)] == [range(0, 1), range(1, 2), range(2, 4)]
    assert [second.positions(index) for index in range(3)] == [range(4, 5), range(5, 6), range(6, 8)]
    assert [second.part(index) for index in (0, 2, 4)] == [(0, 3), (0, 5), (1, 4)]
    assert sum(share.weight(index) for share in (first, second) for index in range(3)) == 6
    pairs = [Batching(8, 1, Process(rank, 3), multiple_of=2).positions(0) for rank in range(3)]
    assert pairs == [range(0, 2), range(2, 4), range(4, 8)]


def test_batches_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="batch_size 4 cannot be shared by 5 processes × accumulate 1; use 5 or more"):
        Batching(4, 1, Process(0, 5))
    with pytest.raises(ValueError, match="batch_size 4 cannot be shared by 2 processes × accumulate 3; use 6 or more"):
        Batching(4, 3, Process(0, 2))
    with pytest.raises(ValueError, match="batch_size 4 cannot be shared by 3 processes × accumulate 1; use 6 or more"):
        Batching(4, 1, Process(0, 3), multiple_of=2)
    with pytest.raises(ValueError, match="batch_size is 16, but there are only 12 images to train on"):
        Batching(16, 1, Process()).micro_batches(12)


@pytest.mark.parametrize(
    ("labels", "shares"), [([0] * 4 + [1, 2], [[2, 2, 2]]), ([0] * 5 + [1, 2], [[3, 2, 2], [2, 3, 2], [2, 2, 3]])]
)
def test_balanced_classes_have_equal_shares(labels: list[int], shares: list[list[int]]) -> None:
    """A single image comes as often as its class should, and no image of the largest class twice in an epoch."""
    seen = set()
    for epoch in range(20):
        order = epoch_order(len(labels), 0, epoch, 2, balanced=labels)
        assert torch.tensor(labels)[order].bincount().tolist() in shares
        largest = [index for index in order.tolist() if labels[index] == 0]
        assert len(set(largest)) == len(largest)
        seen.update(largest)
    assert seen == {index for index, label in enumerate(labels) if label == 0}
