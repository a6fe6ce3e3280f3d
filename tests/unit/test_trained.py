"""What the trainer leaves of the tokens it saw: found again by the rollout that they are from."""

import numpy as np
import pytest

from hone.records import Sample
from hone.transport.trained_tokens import Trained, read_trained


def sample(group, member, mask):
    return Sample([1] * len(mask), mask, [0.0] * len(mask), 1.0, 1.0, group=group, member=member)


def test_it_is_found_by_group_and_member_over_all_ranks(tmp_path):
    # The first token of a sequence is no target, even where the mask says that the policy drew it.
    one = [sample(4, 0, [True, True]), sample(4, 1, [False, True, False, True])]
    two = [sample(4, 1, [False, True]), sample(7, 0, [False, False])]
    Trained(one, np.array([-1, -2, -3], np.float32), np.array([True, False, True])).write_files(
        tmp_path
    )
    Trained(two, np.array([-4], np.float32), np.array([False])).write_files(tmp_path, 1)
    found = read_trained(tmp_path)
    assert {key: [part[0].tolist() for part in parts] for key, parts in found.items()} == {
        (4, 0): [[-1]],
        (4, 1): [[-2, -3], [-4]],
        (7, 0): [[]],
    }
    assert found[4, 1][0][1].tolist() == [False, True]


def test_what_cannot_be_read_is_nothing(tmp_path):
    (tmp_path / "trainer.0.safetensors").write_bytes(b"half of a fi")
    assert read_trained(tmp_path) == {} and read_trained(tmp_path / "absent") == {}
    Trained([], np.zeros(0, np.float32), np.zeros(0, bool)).write_files(tmp_path)
    assert read_trained(tmp_path) == {}


@pytest.mark.parametrize("budget", [None, 40])
def test_the_trainers_numbers_are_in_the_order_of_its_samples(budget):
    """However a batch is split: each sample's logprobs are those of the model for its own targets."""
    import torch

    from hone.config.rl_config import TrainerConfig
    from hone.models.rope import Rope
    from hone.models.spec import LayerAttention, ModelSpec
    from hone.models.transformer import Transformer
    from hone.records import Batch
    from hone.trainer.packing import pack_sequences
    from hone.trainer.rl.trainer import PolicyTrainer

    spec = ModelSpec(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        layers=(LayerAttention(Rope(1e4, 8)),),
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.3,
        qkv_bias=False,
    )
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(0))
    draw = np.random.default_rng(0)
    samples = []
    for i in range(12):
        ids = [1, 2, 3, i // 4, *draw.integers(0, 32, 3 + i % 5).tolist()]
        mask = [False] * 4 + [True] * (len(ids) - 4)
        samples.append(
            Sample(ids, mask, [-3.0] * len(ids), float(i % 3) - 1, 1.0, group=i // 4, member=i % 4)
        )
    packed = pack_sequences([s.ids for s in samples], [s.mask for s in samples])
    with torch.no_grad():
        expected, _ = packed.target_logprobs(model, torch.ones(len(packed.targets_N)))
    trainer = PolicyTrainer(
        model, TrainerConfig(micro_batch_tokens=budget) if budget else TrainerConfig(), 10
    )
    trainer.step(Batch(1, samples))
    starts = np.cumsum([0, *(sum(s.mask) for s in samples)])
    own = {
        (s.group, s.member): expected[starts[i] : starts[i + 1]].tolist()
        for i, s in enumerate(samples)
    }
    end = 0
    for one in trainer.trained.samples:
        count = sum(one.mask)
        assert trainer.trained.logprobs[end : end + count].tolist() == pytest.approx(
            own[one.group, one.member], abs=1e-5
        )
        end += count
    assert end == len(trainer.trained.logprobs) == len(trainer.trained.is_masked)
