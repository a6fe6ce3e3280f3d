"""What a training session takes and returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = Sequence[Any] | NDArray[Any]
# Inputs of losses, one number for each target.
PER_TARGET = ("weights", "logprobs", "advantages", "sequence_ratio_mask")


@dataclass(frozen=True)
class Datum:
    """A sequence to compute, with the targets that it should predict.

    Targets are free: they need not be the next tokens. Position i of `tokens` predicts `targets[i]`.

    Attributes:
        tokens: N input token ids, for example [5, 6, 7].
        targets: N token ids, for example [6, 7, 2]; or N x K, of which each row is predicted by one
            position. Give 0 with weight 0 where there is nothing to predict.
        weights: factor of each target's loss in `cross_entropy`, shaped like `targets`; None: 1.
        logprobs: log-probabilities under the policy that sampled the targets, in nats.
        advantages: advantage of each target.
        sequence_ratio_mask: 1.0 for the targets that count in the sequence ratio of `gspo`.
    """

    tokens: Numbers
    targets: Numbers
    weights: Numbers | None = None
    logprobs: Numbers | None = None
    advantages: Numbers | None = None
    sequence_ratio_mask: Numbers | None = None

    @classmethod
    def from_completion(
        cls,
        prompt: Sequence[int],
        completion: Sequence[int],
        logprobs: Sequence[float] | None = None,
        advantage: float | None = None,
    ) -> "Datum":
        """Return the datum in which a prompt predicts a completion.

        The prompt's own tokens have weight and advantage 0.

        Args:
            prompt: at least one token id.
            completion: the token ids to predict.
            logprobs: the sampler's log-probability of each token of the completion.
            advantage: that of all tokens of the completion.
        """
        tokens = [*prompt, *completion]
        before = len(prompt) - 1

        def pad_prompt(values: Sequence[float]) -> list[float]:
            return [0.0] * before + list(values)

        return cls(
            tokens[:-1],
            tokens[1:],
            weights=pad_prompt([1.0] * len(completion)),
            logprobs=None if logprobs is None else pad_prompt(logprobs),
            advantages=None if advantage is None else pad_prompt([advantage] * len(completion)),
        )

    def build_arrays(self, vocab_size: int, place: str) -> dict[str, NDArray[Any]]:
        """Return tokens, targets, weights and the other inputs that are given, as checked arrays.

        Raises ValueError, which begins with `place`, for ids outside of the vocabulary or other lengths.
        """
        found: dict[str, NDArray[Any]] = {}
        for name in ("tokens", "targets"):
            try:
                ids = np.asarray(getattr(self, name), dtype=np.int64)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{place}: {name} must be token ids: {error}") from None
            if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                wrong = int(ids[(ids < 0) | (ids >= vocab_size)].flat[0])
                raise ValueError(
                    f"{place}: {name} has {wrong}; the model's ids are 0 to {vocab_size - 1}"
                )
            found[name] = ids
        tokens, targets = found["tokens"], found["targets"]
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"{place}: tokens must be a list of at least one id")
        if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
            raise ValueError(
                f"{place}: targets has shape {list(targets.shape)}; wanted [{len(tokens)}] or [{len(tokens)}, K], "
                "a target or K targets for each token"
            )
        found["weights"] = np.ones(targets.shape, np.float32)
        for name in PER_TARGET:
            given = getattr(self, name)
            if given is None:
                continue
            values = np.asarray(given, dtype=np.float32)
            if values.shape != targets.shape:
                raise ValueError(
                    f"{place}: {name} has shape {list(values.shape)}, targets has {list(targets.shape)}"
                )
            if not np.isfinite(values).all():
                raise ValueError(f"{place}: {name} has numbers that are not finite")
            found[name] = values
        return found


@dataclass(frozen=True)
class AdamParams:
    """Settings of one AdamW step; they may differ from step to step.

    Attributes:
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices.
        max_norm: limit of the gradient's norm; None: no limit.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float | None = None


@dataclass(frozen=True)
class ForwardOutput:
    """Result of a pass over data.

    Attributes:
        loss: sum of the losses of all targets; nothing is divided by tokens or data.
        logprobs: for each datum the log-probabilities of its targets at temperature 1, shaped like
            `targets`, fp32.
        metrics: further sums and means, by name.
    """

    loss: float
    logprobs: list[NDArray[np.float32]]
    metrics: Mapping[str, float]
