"""`vf-rl` and `hone.RLTrainer`: run `rl` with the configuration of verifiers' RLTrainer.

VfRLConfig ─ as_rl ─► RLConfig ─► colocated.py or processes.py ─ each step's row ─► Console, callbacks
"""

import contextlib
import json
import logging
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hone import machine
from hone.config.base import validate_values
from hone.config.key_names import use_key_names
from hone.config.rl_config import RLConfig
from hone.config.vf_rl_config import PYTHON_KEY_NAMES, VF_RL_KEY_NAMES, RLTrainerArgs, VfRLConfig
from hone.environments import Environment
from hone.environments.registry import add_folder
from hone.monitors.events import Events
from hone.monitors.metrics_log import read_rows
from hone.monitors.trainer_lines import loss_line, sample_block, step_line
from hone.orchestrator.rollouts_file import FILE
from hone.run_directory import RunDirectory, checkpoints_in
from hone.users_code import CONTAINED

Callback = Callable[[int, dict[str, Any]], object]
# Steps after which a reward that has risen by less is reported.
FLAT_AFTER = 20
FLAT_REWARD_STD = 0.02
# Share of masked tokens, or mismatch KL, from which training counts as unstable
UNSTABLE_SHARE = 0.5


class RLTrainer:
    """Train a model on an environment's rewards.

        RLTrainer(model, env, RLConfig(max_steps=100)).train()

    Args:
        model: a directory in Hugging Face format, or a hub id.
        env: an environment, or its id.
        args: training arguments, the same as in section `[trainer.args]` of a `vf-rl` file.
        env_args: arguments of the environment, if `env` is an id.
        inference: flags of the sampler, the same as in section `[inference.args]` of a `vf-rl` file.
        callbacks: functions called after each step as `callback(step, row)`, where `row` is the
            step's row of metrics.jsonl. If a callback returns False, training stops. A run in one
            process first saves this step as its last; a run in several processes stops at once and
            keeps the checkpoints written so far.

    Raises ValueError for invalid combinations.
    """

    def __init__(
        self,
        model: str | Path,
        env: str | Environment,
        args: RLTrainerArgs | None = None,
        *,
        env_args: dict[str, Any] | None = None,
        inference: dict[str, Any] | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        name = env if isinstance(env, str) else env.name or "environment"
        self.environment = None if isinstance(env, str) else env
        values = {
            "model": str(model),
            "env": {"id": name, "args": env_args or {}},
            "inference": {"args": inference or {}},
            "trainer": {"args": args or RLTrainerArgs()},
            "deployment": "auto"
            if self.environment is None
            else "colocated",  # an object stays in this process
        }
        self.config = validate_values(VfRLConfig, values)
        self.callbacks = list(callbacks)
        self.key_names = PYTHON_KEY_NAMES

    @classmethod
    def from_config(cls, config: VfRLConfig) -> "RLTrainer":
        trainer = cls.__new__(cls)
        trainer.config = config
        trainer.environment = None
        trainer.callbacks = []
        trainer.key_names = VF_RL_KEY_NAMES
        return trainer

    def train(self, resume: bool | str = False, clean: bool = False) -> list[dict[str, Any]]:
        """Train until the last step; return the rows of metrics.jsonl of the training steps.

        Args:
            resume: True resumes the run from its newest checkpoint; "auto" does the same if there
                is a checkpoint; a path resumes from the checkpoint at that path.
            clean: remove an earlier run first.
        """
        machine.prepare_environment()
        if not logging.getLogger("hone").handlers:  # the run's log files have everything
            logging.getLogger("hone").setLevel(logging.INFO)
        given = {key: value for key, value in (("resume", resume), ("clean", clean)) if value}
        config = self.config.model_copy(update=given)
        add_folder("environments", config.env.id)
        with use_key_names(self.key_names):
            self._run(config, config.resolve_config())
        return self.history

    def _run(self, config: VfRLConfig, run: RLConfig) -> None:
        from hone.trainer.checkpoint import resume_from, step_of

        sources = (
            resume_from(RunDirectory(run.output_dir, "rl", run.layout), run.resume)
            if run.resume
            else []
        )
        if sources and step_of(sources[0]) >= run.max_steps:
            print(f"{sources[0]} is of the last step: there is nothing left to do")
            return
        console = Console(config, run, self.callbacks)
        console.start_watching()
        from hone.launch.run_rl import main

        objects = None if self.environment is None else {config.env.known_as: self.environment}
        main(run, console, objects)

    @property
    def output_dir(self) -> Path:
        return self.config.output_dir

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl of the training steps."""
        return [row for row in read_rows(self.output_dir / "metrics.jsonl") if "reward/mean" in row]

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Return the directories of the weights by step, oldest first."""
        return checkpoints_in(self.output_dir)

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of a step's rollouts.jsonl."""
        return read_rows(self.output_dir / "rollouts" / f"step_{step}" / FILE)


def main(config: VfRLConfig) -> None:
    RLTrainer.from_config(config).train()


def _print_line(text: str) -> None:
    with contextlib.suppress(OSError):  # no reader (`vf-rl … | head`): the run continues
        print(text, flush=True)


class Console(Events):
    """Print the progress of a run as verifiers' RLTrainer does, and call the user's callbacks."""

    def __init__(self, config: VfRLConfig, run: RLConfig, callbacks: list[Callback]) -> None:
        self.config = config
        self.run = run
        self.callbacks = callbacks
        self.files = RunDirectory(run.output_dir, "rl", run.layout)
        self.first: list[float] = []
        self.has_remarked = False

    def start_watching(self) -> None:
        print(f"Loading environment {self.config.env.id}...")
        print(f"Loading model {self.config.model}...", flush=True)
        if machine.usable_gpus():
            from hone.launch.estimate import memory_lines

            for line in memory_lines(self.run):
                print(f"Memory, about: {line}", flush=True)

    def on_servers(self, addresses: list[str]) -> None:
        for address in addresses:
            print(f"Starting inference server on port {address.rpartition(':')[2]}...")
        print("Waiting for inference server to be ready...", flush=True)
        threading.Thread(target=self._await_servers, args=(addresses,), daemon=True).start()

    def _await_servers(self, addresses: list[str]) -> None:
        import httpx

        deadline = time.monotonic() + self.config.trainer.args.vllm_server_timeout
        for address in addresses:
            host, _, port = address.rpartition(":")
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}/health"
            while True:
                try:
                    if httpx.get(url, timeout=2.0, trust_env=False).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                if time.monotonic() > deadline:
                    return
                time.sleep(0.2)
        _print_line("Inference server is ready")

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        args = self.config.trainer.args
        row = {**values, "step": step}
        if step % args.logging_steps == 0 or step == args.max_steps:
            _print_line(loss_line(row))
            _print_line(step_line(row, args.max_steps))
        if args.sample_steps and step % args.sample_steps == 0:
            self._show_sample(step)
        self._show_remark(row)
        with CONTAINED:
            return all([callback(step, row) is not False for callback in self.callbacks])

    def on_weights(self, directory: Path) -> None:
        _print_line(f"Saved {directory}")

    def _show_sample(self, step: int) -> None:
        """Print one rollout of a step, drawn with the step as random seed."""
        try:
            rows = read_rows(self.files.rollouts / f"step_{step}" / FILE)
        except OSError:
            return
        if rows:
            _print_line(sample_block(step, random.Random(step).choice(rows)))

    def _show_remark(self, row: dict[str, Any]) -> None:
        """Warn once if metrics indicate a known problem, and say what usually helps."""
        if self.has_remarked:
            return
        log = logging.getLogger("hone.rl")
        if (
            row.get("is_masked/mean", 0.0) > UNSTABLE_SHARE
            or row.get("mismatch_kl/mean", 0.0) > UNSTABLE_SHARE
        ):
            self.has_remarked = True
            log.warning(
                "Step %d: training is unstable (mismatch KL %.2f, %.0f %% of the tokens masked); what helps: a lower "
                "learning_rate, a larger rollouts_per_example or batch_size",
                row["step"],
                row.get("mismatch_kl/mean", 0.0),
                100 * row.get("is_masked/mean", 0.0),
            )
        if "reward/mean" in row and len(self.first) < FLAT_AFTER:
            self.first.append(row["reward/mean"])
            if len(self.first) == FLAT_AFTER:
                self._show_comparison(row["step"], log)

    def _show_comparison(self, step: int, log: logging.Logger) -> None:
        quarter = FLAT_AFTER // 4
        before, now = (
            sum(part) / quarter for part in (self.first[:quarter], self.first[-quarter:])
        )
        if now - before >= FLAT_REWARD_STD or before > 0.9:
            return
        self.has_remarked = True
        if before - now > FLAT_REWARD_STD:
            cause = "the steps may be too large"
            helps = "a lower learning_rate, a larger batch_size"
        elif now < 0.05:
            cause = "the task may be too hard for this model"
            helps = "easier examples, a supervised warm-up before"
        else:
            cause = "the steps may be too small, or the rollouts too alike"
            helps = "a higher learning_rate, a higher temperature, more rollouts_per_example"
        given = shlex.quote(json.dumps(self.config.env.to_public_dict()["args"], default=str))
        log.warning(
            "Step %d: the reward has gone from %.3f to %.3f: %s; what helps: %s. How the model does without training: "
            "hone eval run %s -m %s -n 20 -t %d%s",
            step,
            before,
            now,
            cause,
            helps,
            self.config.env.id,
            self.config.model,
            self.config.trainer.args.max_tokens,
            f" -a {given}" if self.config.env.args else "",
        )
