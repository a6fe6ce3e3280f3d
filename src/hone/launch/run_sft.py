"""`sft`: the trainer, with evaluation between steps if configured."""

from hone.config.sft_config import SFTConfig
from hone.trainer.sft.train import main as train


def main(config: SFTConfig) -> None:
    if config.eval is None:
        return train(config)
    from hone.evals.in_training import Evaluation

    train(config, Evaluation(config.eval, config.seed))
