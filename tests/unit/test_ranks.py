"""Shares of a batch: every item has one rank, and ranks have much the same to do."""

import numpy as np
import pytest
import torch

from hone.trainer.ranks import Ranks


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_cover_all_and_are_balanced(count):
    costs = np.random.default_rng(0).integers(1, 2000, 64).tolist()
    shares = [Ranks(rank, count).share(range(64), costs) for rank in range(count)]
    assert sorted(i for share in shares for i in share) == list(range(64))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) < 1.02 * min(loads)


def test_more_ranks_than_items_leaves_some_without():
    assert [Ranks(rank, 3).share(["a", "b"], [1, 2]) for rank in range(3)] == [["b"], ["a"], []]


def test_alone_nothing_is_sent():
    ranks, x = Ranks(), torch.ones(3)
    assert ranks.sum(x) is x and ranks.gather(x).tolist() == [1, 1, 1] and ranks.is_first
    ranks.wait()
    ranks.leave()
