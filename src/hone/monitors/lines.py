"""The step lines of the console, as scripts read them: `Step N | Time: … | Reward: …`."""


def orchestrator_line(step: int, values: dict[str, float]) -> str:
    return (
        f"Step {step} | Time: {values['time/step']:.2f}s | Reward: {values['reward/mean']:.4f} | "
        f"Throughput: {values['perf/throughput']:.0f} tokens/s | Seq. Length: {values['seq_len/mean']:.1f} tokens | "
        f"Async Level: {values['batch/async_level']:.0f} | "
        f"Max. Off-Policy Level: {values['batch/off_policy_level/max']:.0f}"
    )


def trainer_line(step: int, values: dict[str, float]) -> str:
    used = f"{values['perf/mfu']:.1%}" if "perf/mfu" in values else "n/a"
    return (
        f"Step {step} | Time: {values['time/train']:.2f}s | Loss: {values['loss/mean']:.4f} | "
        f"Entropy: {values['entropy/mean']:.4f} | Mismatch KL: {values['mismatch_kl/mean']:.2e} | "
        f"Grad. Norm: {values['optim/grad_norm']:.4f} | LR: {values['optim/lr']:.2e} | "
        f"Throughput: {values['perf/train_throughput']:.0f} tokens/s | MFU: {used} | "
        f"Peak Mem.: {values['perf/peak_memory']:.1f} GiB"
    )


def why_no_signal(step: int, values: dict[str, float]) -> str:
    """One sentence on a step without anything to learn from: why, and what usually helps."""
    if values["batch/solve_all"] == 1:
        why, cure = "every rollout was solved", "harder examples, or fewer of them"
    elif values["is_truncated/mean"] > 0.5:
        why, cure = "most completions were cut off", "a larger orchestrator.sampling.max_tokens"
    elif values["batch/solve_none"] == 1:
        why, cure = "no rollout was rewarded", "a longer supervised warm-up, easier examples, or partial rewards"
    else:
        why, cure = "the rollouts of each group had the same reward", "more rollouts an example, or a finer reward"
    failed = f" ({values['progress/failed']:.0f} failed)" if values["progress/failed"] else ""
    return f"Step {step}: nothing to learn from: {why}{failed}; what helps: {cure}"
