"""Shares of a batch: every item has one rank, and ranks have much the same to do."""

import numpy as np
import pytest
import torch

from hone.trainer.packing import share_by_prompt
from hone.trainer.ranks import Ranks


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_cover_all_and_are_balanced(count):
    costs = np.random.default_rng(0).integers(1, 2000, 64).tolist()
    shares = [Ranks(rank, count).own_share(range(64), costs) for rank in range(count)]
    assert sorted(i for share in shares for i in share) == list(range(64))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) < 1.02 * min(loads)


def test_groups_stay_together_where_ranks_have_as_much_to_do_so():
    a, b = (1,), (2,)

    def shares(prompts, lengths, count):
        return [share_by_prompt(Ranks(rank, count), prompts, lengths) for rank in range(count)]

    assert shares([a, b] * 4, [10] * 8, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # A rank without would wait for the others
    assert sorted(map(len, shares([a] * 16, [10] * 16, 4))) == [4, 4, 4, 4]
    assert shares([a, a, b], [3, 4, 5], 1) == [[0, 1, 2]]
    assert shares([], [], 3) == [[], [], []]


def test_more_ranks_than_items_leaves_some_without():
    assert [Ranks(rank, 3).own_share(["a", "b"], [1, 2]) for rank in range(3)] == [["b"], ["a"], []]


def test_alone_nothing_is_sent():
    ranks, x = Ranks(), torch.ones(3)
    assert (
        ranks.sum_over_ranks(x) is x
        and ranks.gather_numbers(x).tolist() == [1, 1, 1]
        and ranks.is_first
    )
    ranks.barrier()
    ranks.leave_ranks()
