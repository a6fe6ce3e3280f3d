"""What a step of `sft` minimizes: the mean of a loss over the targets, or over pairs, of the whole step.

An objective sums over a micro-batch; the caller divides by the units of the step, so that the result
does not depend on how the step is split over micro-batches and ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.config.sft_config import DPOConfig
from hone.models.language_model import LanguageModel
from hone.trainer.loss import compute_reference_logprobs, cross_entropy_sum
from hone.trainer.packing import Packed, pack_sequences, pack_shared
from hone.trainer.sft.data import Conversation, Row

PAIR_METRICS = (
    "rewards/accuracies",
    "rewards/margins",
    "rewards/chosen",
    "rewards/rejected",
    "logps/chosen",
    "logps/rejected",
)


class Objective(Protocol):
    """A loss that is summed over the conversations of a micro-batch.

    Attributes:
        metrics: names of further sums, which the caller divides as it divides the loss.
        passes: FLOPs of a step's passes, as a multiple of one forward pass.
    """

    metrics: tuple[str, ...]
    passes: int

    @property
    def nothing(self) -> Row:
        """Return what a rank without rows processes; it counts for nothing."""
        ...

    def count_units(self, conversations: Sequence[Conversation]) -> int:
        """Return the number of units that the loss is a mean over."""
        ...

    def pack_conversations(
        self, conversations: Sequence[Conversation], device: torch.device
    ) -> Packed:
        """Pack conversations into a micro-batch."""
        ...

    def sum_losses(self, packed: Packed, model: LanguageModel) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, with gradient, and the sums of `metrics`, without."""
        ...


NO_TARGETS: Conversation = ([0, 0], [False, True])


class CrossEntropy:
    """Mean of -log p over the targets."""

    metrics: tuple[str, ...] = ()
    passes = 3

    @property
    def nothing(self) -> Row:
        return [NO_TARGETS]

    def count_units(self, conversations: Sequence[Conversation]) -> int:
        return sum(sum(mask[1:]) for _, mask in conversations)

    def pack_conversations(
        self, conversations: Sequence[Conversation], device: torch.device
    ) -> Packed:
        return pack_sequences(
            [ids for ids, _ in conversations], [mask for _, mask in conversations], device
        )

    def sum_losses(self, packed: Packed, model: LanguageModel) -> tuple[Tensor, Tensor]:
        total = cross_entropy_sum(packed, model)
        return total, total.new_zeros(0)


@dataclass
class DirectPreference:
    """Mean of the DPO loss over pairs (Rafailov et al. 2023, arXiv 2305.18290).

    Conversations alternate: chosen, rejected, chosen, … Their shared prompt is computed once.

    Attributes:
        reference: the initial model; None if the model without its adapter is the initial model.
    """

    config: DPOConfig
    reference: LanguageModel | None = None
    metrics: tuple[str, ...] = PAIR_METRICS
    passes = 4

    @property
    def nothing(self) -> Row:
        return [NO_TARGETS, NO_TARGETS]

    def count_units(self, conversations: Sequence[Conversation]) -> int:
        return len(conversations) // 2

    def pack_conversations(
        self, conversations: Sequence[Conversation], device: torch.device
    ) -> Packed:
        return pack_shared(
            [ids for ids, _ in conversations], [mask for _, mask in conversations], device
        )

    def sum_losses(self, packed: Packed, model: LanguageModel) -> tuple[Tensor, Tensor]:
        ones_N = torch.ones(len(packed.targets_N), device=packed.targets_N.device)
        reference_N = compute_reference_logprobs(packed, model, self.reference, ones_N)
        logprobs_N, _ = packed.target_logprobs(model, ones_N)
        count = packed.count
        found = [
            sums.new_zeros(count).index_add(0, packed.sequence_N, sums)
            for sums in (logprobs_N, reference_N, ones_N)
        ]
        answers = Answers(*(one.view(-1, 2) for one in found))
        losses_P = pair_losses(answers, self.config)
        return losses_P.sum(), pair_metrics(answers, self.config.beta)


@dataclass(frozen=True)
class Answers:
    """Sums over the tokens of answers, P x 2: the chosen and the rejected one of P pairs.

    Attributes:
        logprobs: log-probabilities of the model.
        reference: those of the reference.
        lengths: numbers of tokens.
    """

    logprobs: Tensor
    reference: Tensor
    lengths: Tensor


def pair_losses(answers: Answers, config: DPOConfig) -> Tensor:
    """Return the loss of each of P pairs.

    With d the log ratio of model and reference of an answer and m = d(chosen) - d(rejected):

        sigmoid   -(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m)     s: label_smoothing
        hinge     max(0, 1 - beta m)                     (SLiC-HF, Zhao et al. 2023, arXiv 2305.10425)
        ipo       (m - 1 / (2 beta))^2, d averaged over tokens       (Azar et al. 2023, arXiv 2310.12036)

    plus sft_weight times the mean of -log p over the tokens of the chosen answer (Pang et al. 2024,
    arXiv 2404.19733).
    """
    beta = config.beta
    ratios_P2 = answers.logprobs - answers.reference
    if config.type == "ipo":
        ratios_P2 = ratios_P2 / answers.lengths
    margins_P = ratios_P2[:, 0] - ratios_P2[:, 1]
    if config.type == "sigmoid":
        smoothing = config.label_smoothing
        losses_P = -(1 - smoothing) * F.logsigmoid(beta * margins_P)
        losses_P = losses_P - smoothing * F.logsigmoid(-beta * margins_P)
    elif config.type == "hinge":
        losses_P = (1 - beta * margins_P).relu()
    else:
        losses_P = (margins_P - 1 / (2 * beta)).square()
    if config.sft_weight:
        losses_P = losses_P - config.sft_weight * answers.logprobs[:, 0] / answers.lengths[:, 0]
    return losses_P


@torch.no_grad()
def pair_metrics(answers: Answers, beta: float) -> Tensor:
    """Return the sums over pairs of PAIR_METRICS. A reward is beta times an answer's log ratio."""
    rewards_P2 = beta * (answers.logprobs - answers.reference)
    margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    rows = [(margins_P > 0).float(), margins_P, *rewards_P2.T, *answers.logprobs.T]
    return torch.stack([row.sum() for row in rows])
