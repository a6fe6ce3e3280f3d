"""Shares of a batch: every item has one rank, and ranks have much the same to do."""

import numpy as np
import pytest
import torch

from hone.config.rl_config import TrainerConfig
from hone.models.families import parse_model_config
from hone.models.families.qwen3_moe import Qwen3Moe
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.trainer.division_checks import check_division
from hone.trainer.packing import share_by_prompt
from hone.trainer.ranks import Ranks
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.sharding import shard_model

SIZES = (40, 32, 48, 2, 6, 3, 16, 1e-6, make_plain_layers(100.0, 16, 2), True, 64, 0.3, False)


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


def test_neighbours_have_one_share():
    costs = [5, 4, 3, 2, 1, 1]
    shares = [Ranks(rank, 4, 2).own_share(range(6), costs) for rank in range(4)]
    assert shares[0] == shares[1] and shares[2] == shares[3]
    assert sorted(shares[0] + shares[2]) == list(range(6))
    with pytest.raises(ValueError, match="context_parallel 2: there are 3 trainer processes"):
        Ranks(0, 3).with_context(2)


def test_heads_that_cannot_be_divided_are_refused_by_name():
    check_division(ModelSpec(*SIZES), 3, False)
    check_division(ModelSpec(*SIZES), 6, False)  # key/value heads are repeated
    with pytest.raises(ValueError, match="context_parallel 4: the model's 6 query heads"):
        check_division(ModelSpec(*SIZES), 4, False)
    with pytest.raises(ValueError, match="context_parallel 2: the model has 3 key/value heads"):
        check_division(ModelSpec(*SIZES), 2, False)
    delta = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    with pytest.raises(ValueError, match="the model's 3 key heads of the delta rule"):
        check_division(parse_model_config(delta), 2, False)


def test_experts_that_cannot_be_divided_are_refused_by_name():
    with pytest.raises(ValueError, match="expert_parallel: this model is not a mixture of experts"):
        check_division(ModelSpec(*SIZES), 1, True)
    mixture = Transformer(Qwen3Moe(*SIZES, experts=4, experts_per_token=2, normalizes=True))
    with pytest.raises(ValueError, match="4 experts cannot be divided evenly among 3"):
        shard_model(mixture, Ranks(0, 3), "auto", expert_parallel=True)
    with pytest.raises(ValueError, match="expert_parallel: sharding none"):
        shard_model(mixture, Ranks(0, 2), "none", expert_parallel=True)
    with pytest.raises(ValueError, match="context_parallel: sharding none"):
        shard_model(mixture, Ranks(0, 2, 2), "none")
    shard_model(mixture, Ranks(), "auto", expert_parallel=True)  # one process has all experts
    assert all(layer.ranks is None for layer in mixture.expert_layers)


def test_one_process_does_not_divide_tokens():
    config = TrainerConfig.model_validate({"context_parallel": 3})
    with pytest.raises(ValueError, match="context_parallel 3: there is 1 trainer process"):
        PolicyTrainer(Transformer(ModelSpec(*SIZES)), config, max_steps=1)
