"""Keys of prime-rl's configuration files, late 2025 to 2026, and what they are in Hone.

All keys are spelled as in a file of `rl`: a component's own file leaves its prefix out. A key stands
for itself and for all keys below it. Imports no torch.
"""

from dataclasses import dataclass

# The same value under another key.
RENAMED = {
    "orchestrator.group_size": "orchestrator.rollouts_per_example",
    "orchestrator.train.group_size": "orchestrator.rollouts_per_example",
    "orchestrator.train.sampling.temperature": "orchestrator.sampling.temperature",
    "orchestrator.train.sampling.max_completion_tokens": "orchestrator.sampling.max_tokens",
    "orchestrator.train.sampling.max_tokens": "orchestrator.sampling.max_tokens",
    "orchestrator.train.sampling.top_p": "orchestrator.sampling.top_p",
    "orchestrator.train.sampling.top_k": "orchestrator.sampling.top_k",
    "orchestrator.train.sampling.min_p": "orchestrator.sampling.min_p",
    "orchestrator.train.filter_zero_advantages": "orchestrator.drop_zero_signal",
    "orchestrator.model.client.base_url": "orchestrator.client.base_url",
    "orchestrator.model.client.api_key_var": "orchestrator.client.api_key_var",
    "orchestrator.model.client.wait_for_ready_timeout": "orchestrator.client.ready_timeout",
    "orchestrator.client.wait_for_ready_timeout": "orchestrator.client.ready_timeout",
    "orchestrator.eval.eval_base_model": "orchestrator.eval.at_start",
    "orchestrator.eval.group_size": "orchestrator.eval.rollouts_per_example",
    "orchestrator.eval.sampling.temperature": "orchestrator.eval.temperature",
    "orchestrator.eval.sampling.max_tokens": "orchestrator.eval.max_tokens",
    "orchestrator.eval.sampling.max_completion_tokens": "orchestrator.eval.max_tokens",
    "monitors.wandb.project": "wandb.project",
    "monitors.wandb.name": "wandb.name",
    "monitors.wandb.group": "wandb.group",
    "monitors.wandb.offline": "wandb.offline",
    "wandb.log_extras.interval": "wandb.interval",
    "ckpt.keep_last": "ckpt.keep",
    "ckpt.keep_interval": "ckpt.keep_every",
    "log.level": "log_level",
    "tokenizer.chat_template": "model.chat_template",
    "trainer.model.lora.rank": "trainer.lora.rank",
    "trainer.model.lora.alpha": "trainer.lora.alpha",
    "trainer.model.lora.dropout": "trainer.lora.dropout",
    "trainer.model.lora.target_modules": "trainer.lora.targets",
    "trainer.model.lora.modules_to_save": "trainer.lora.modules_to_save",
    "trainer.model.name": "model.name",
    "trainer.model.debug.random_init": "model.random_init",
    "trainer.enable_router_replay": "trainer.replay_routing",
    "trainer.dist_timeout_seconds": "ranks_timeout",
    "orchestrator.model.name": "model.name",
    "inference.model.name": "model.name",
    "inference.model.max_model_len": "inference.max_model_len",
    "inference.model.enforce_eager": "inference.enforce_eager",
    "inference.model.dtype": "model.dtype",
    "inference.model.chat_template": "model.chat_template",
    "inference.parallel.tp": "inference.tensor_parallel_size",
    "inference.parallel.dp": "inference.data_parallel_size",
    "inference.vllm.model": "model.name",
    "inference.vllm.dtype": "model.dtype",
    "inference.vllm.chat_template": "model.chat_template",
    "inference.vllm.max_model_len": "inference.max_model_len",
    "inference.vllm.enforce_eager": "inference.enforce_eager",
    "inference.vllm.tensor_parallel_size": "inference.tensor_parallel_size",
    "inference.vllm.data_parallel_size": "inference.data_parallel_size",
    "inference.vllm.data_parallel_size_local": "inference.data_parallel_size_local",
    "inference.vllm.data_parallel_rpc_port": "inference.data_parallel_rpc_port",
    "inference.vllm.gpu_memory_utilization": "inference.gpu_memory_utilization",
    "data.pack_function": "data.pack",
    "data.probabilities": "data.weights",
    "data.seed": "seed",
    "val.data.name": "val.name",
}

# What Hone does without a key, or does not have to do.
NEEDLESS = {
    "orchestrator.renderer.name": "prompts are rendered by the model's chat template",
    "orchestrator.renderer.reasoning_parser": "rewards see the text as it was sampled",
    "orchestrator.concurrency": "rollouts in flight follow from batch_size and max_async_level",
    "orchestrator.max_concurrent": "rollouts in flight follow from batch_size and max_async_level",
    "orchestrator.strict_async_level": "max_async_level is never exceeded",
    "orchestrator.trajectory_strategy": "turns whose prompt extends the last become one sample",
    "orchestrator.micro_batch_size": "micro-batches are sized automatically",
    "orchestrator.num_train_workers": "the trainer's processes divide a batch",
    "orchestrator.pad_to_multiple_of": "sequences are packed without padding",
    "orchestrator.model.lora": "the sampler gets the adapter that the trainer trains",
    "orchestrator.lora_name": "the sampler gets the adapter that the trainer trains",
    "orchestrator.client.timeout": "requests wait until the rollout's own timeout",
    "orchestrator.client.skip_model_check": "the weights are compared by their canary",
    "orchestrator.model.client.skip_model_check": "the weights are compared by their canary",
    "orchestrator.env_server_base_port": "environments are child processes without ports",
    "orchestrator.collect_inference_metrics": "they are in metrics.jsonl",
    "orchestrator.inference_metrics_roles": "they are in metrics.jsonl",
    "orchestrator.mask_env_responses": "only sampled tokens have a loss",
    "orchestrator.buffer.seed": "draws follow from seed",
    "orchestrator.env_mix.seed": "draws follow from seed",
    "orchestrator.env_mix.stopping_strategy": "environments start over at their end",
    "orchestrator.eval.retrigger_on_resume": "an evaluation that was cut off is repeated",
    "orchestrator.eval.concurrency": "evaluations share the servers with training",
    "orchestrator.eval.env_server_base_port": "environments are child processes without ports",
    "rollout_transport": "rollouts reach the trainer through files",
    "monitors.file": "metrics.jsonl and rollouts/ are always written",
    "wandb.log_extras.samples": "wandb.samples rollouts of a step are logged",
    "ckpt.weights": "weights/ has safetensors, and adapters as peft writes them",
    "ckpt.wait_for_weights_timeout": "a run has one checkpoint for all components",
    "log.vf_level": "environments log at log_level",
    "log.file": "logs/ is always written",
    "log.log_data": "rollouts/ has the data",
    "log.interval": "log_interval counts steps",
    "log.ranks_filter": "rank 0 logs",
    "model.compile": "Hone's kernels need no compiler",
    "model.impl": "model.implementation chooses Hone's own or transformers' modules",
    "model.attn": "attention is Hone's",
    "trainer.model.impl": "model.implementation chooses Hone's own or transformers' modules",
    "trainer.model.attn": "attention is Hone's",
    "trainer.model.compile": "Hone's kernels need no compiler",
    "trainer.model.ac_offloading": "activations are recomputed where they do not fit",
    "trainer.model.reshard_after_forward": "trainer.sharding chooses",
    "trainer.model.dp_replicate": "trainer.sharding chooses",
    "trainer.model.load_using_meta": "weights are loaded once",
    "trainer.model.optimization_dtype": "weights follow model.dtype, with fp32 masters",
    "trainer.model.reduce_dtype": "gradients are summed in fp32",
    "trainer.model.moe_router_dtype": "routers compute in the model's dtype, their softmax in fp32",
    "trainer.model.moe_use_grouped_mm": "experts use grouped products",
    "trainer.model.moe_fused_kernel": "experts use grouped products",
    "trainer.model.fused_lm_head_token_chunk_size": "logits are computed in chunks",
    "trainer.model.freeze_moe_router": "LoRA leaves routers as they are",
    "trainer.ckpt": "ckpt is of all components",
    "orchestrator.ckpt": "ckpt is of all components",
    "trainer.tokenizer": "the model's tokenizer is used",
    "orchestrator.tokenizer": "the model's tokenizer is used",
    "trainer.gc": "the collector is set for all processes",
    "trainer.matmul_precision": "products are in the model's dtype",
    "gc": "the collector is set for all processes",
    "matmul_precision": "products are in the model's dtype",
    "loss_impl": "the loss is computed in chunks of the logits",
    "data.num_workers": "conversations are rendered before they are needed",
    "data.stopping_strategy": "data.weights says how often each set is used in an epoch",
    "inference.enable_lora": "the sampler gets the adapter that the trainer trains",
    "inference.vllm.enable_lora": "the sampler gets the adapter that the trainer trains",
    "inference.vllm.max_loras": "the sampler gets the adapter that the trainer trains",
    "inference.vllm.max_cpu_loras": "the sampler gets the adapter that the trainer trains",
    "inference.vllm.max_lora_rank": "the sampler gets the adapter that the trainer trains",
    "inference.vllm.lora_target_modules": "the sampler gets the adapter that the trainer trains",
    "inference.vllm.enable_return_routed_experts": "trainer.replay_routing asks for them",
    "inference.vllm.api_server_count": "one server answers for all requests",
    "inference.vllm.seed": "draws follow from seed",
    "inference.api_server_count": "one server answers for all requests",
    "inference.seed": "draws follow from seed",
    "inference.model.enable_auto_tool_choice": "tool calls are always read",
    "inference.backend_port": "a server has one port",
    "inference.router": "groups are spread over inference_replicas",
    "inference.weight_broadcast": "weight_broadcast is of all components",
    "inference.output_dir": "output_dir is of all components",
    "inference.log": "log_level is of all components",
    "inference.server.liveness_timeout_seconds": "/health answers while the engine works",
    "inference.enable_fp32_lm_head": "logits are summed in fp32",
    "inference.enable_fp32_router_logits": "routers' softmax is in fp32",
    "weight_broadcast.port": "a free port is chosen",
    "weight_broadcast.timeout": "orchestrator.weights_timeout is the limit",
    "weight_broadcast.inference_world_size": "it follows from inference_gpu_ids",
    "weight_broadcast.adapter_only": "with LoRA only adapters travel",
    "weight_broadcast.save_sharded": "files are written in parts",
    "weight_broadcast.save_format": "files are safetensors",
    "deployment.gpus_per_node": "inference_gpu_ids and trainer_gpu_ids name the GPUs",
}

# What Hone does not do; each with what to do instead, if there is something.
LOST = {
    "orchestrator.renderer": "the chat template alone decides how earlier turns are rendered",
    "orchestrator.tasks_per_minute": "rollouts are not limited by time",
    "orchestrator.token_batch_size": "batch_size counts rollouts",
    "orchestrator.train.sampling.extra_body": "this key is not sent to the sampler",
    "orchestrator.sampling.extra_body": "this key is not sent to the sampler",
    "orchestrator.sampling.min_tokens": "completions have no least length in training",
    "orchestrator.sampling.seed": "draws follow from seed",
    "orchestrator.eval.sampling": "evaluations have a temperature and max_tokens alone",
    "orchestrator.eval.save": "hone dashboard and rollouts/ show evaluations; vf-eval -o writes files",
    "orchestrator.heartbeat": "no heartbeats are sent",
    "orchestrator.client.headers": "no headers are sent but the key",
    "orchestrator.model.client.headers": "no headers are sent but the key",
    "orchestrator.algo": "this algorithm, or option of it, is not here; docs/algorithms.md lists those that are",
    "orchestrator.train.algo": "this algorithm, or option of it, is not here; docs/algorithms.md lists those that are",
    "orchestrator.buffer": "docs/configuration.md lists the keys of orchestrator.buffer",
    "orchestrator.constant_trainer_batch_size": "a step trains on the rollouts that have a signal",
    "orchestrator.bench": "rl --bench.sequences N measures the trainer",
    "monitors.wandb.entity": "set WANDB_ENTITY",
    "monitors.wandb.tags": "set WANDB_TAGS",
    "monitors.prime": "runs are not sent to a hosted service",
    "wandb.id": "a resumed run continues its own W&B run",
    "ckpt.output_dir": "checkpoints are in output_dir",
    "ckpt.skip_progress": "a checkpoint is resumed as a whole; --fork RUN@N begins a new run from it",
    "ckpt.skip_scheduler": "a checkpoint is resumed as a whole; --fork RUN@N begins a new run from it",
    "ckpt.skip_dataloader": "a checkpoint is resumed as a whole; --fork RUN@N begins a new run from it",
    "ckpt.skip_optimizer": "a checkpoint is resumed as a whole; --fork RUN@N begins a new run from it",
    "ckpt.skip_buffer": "a checkpoint is resumed as a whole; --fork RUN@N begins a new run from it",
    "ckpt.buffer_path": "a checkpoint is resumed as a whole",
    "deployment": "hone slurm rl --train-nodes N --infer-nodes N starts a run on several nodes",
    "slurm": "hone slurm submits a run; its flags have the job's name, partition and time",
    "toml_files": "give several files: rl @ one.toml @ two.toml",
    "env_vars": "set variables in the shell",
    "trainer.env_vars": "set variables in the shell",
    "orchestrator.env_vars": "set variables in the shell",
    "inference.env_vars": "set variables in the shell",
    "dry_run": "rl @ FILE --dry-run",
    "tokenizer.name": "the tokenizer is the model's; put it into the model's directory",
    "model.vlm": "the text part of a model with vision is trained",
    "trainer.model.quantization": "trainer.lora.base_bits = 8 stores the base in 8 bits",
    "trainer.model.debug": "give a config.json of the size that you want",
    "trainer.data": "rl --bench.sequences N trains on random sequences",
    "trainer.metrics_server": "servers have /metrics; the trainer writes metrics.jsonl",
    "trainer.memory_profiler_path": "no profiles are written",
    "trainer.trace_path": "no traces are written",
    "trainer.heartbeat": "no heartbeats are sent",
    "trainer.optim.mu": "Muon's momentum is fixed",
    "optim.mu": "Muon's momentum is fixed",
    "inference.use_deep_gemm": "choose vLLM's own settings with inference.vllm_args",
    "inference.kv_cache_offload": "keys and values stay on the GPU",
    "inference.deployment": "hone slurm rl --infer-nodes N starts servers on several nodes",
    "inference.slurm": "hone slurm submits a server",
    "inference.use_pd_kv_transfer": "prefill and decoding share a server",
    "data.subsets": "name a local file for each part of a data set",
    "use_tqdm": "progress is shown on a terminal",
}

# Keys that `hone convert` changes into others, for messages: what they become.
CHANGED = {
    "environment": "orchestrator.env",
    "orchestrator.environment": "orchestrator.env",
    "orchestrator.train.env": "orchestrator.env",
    "orchestrator.train.source": "orchestrator.env",
    "orchestrator.eval.source": "orchestrator.eval.env",
    "eval.source": "eval.env",
    "orchestrator.eval.skip_first_step": "orchestrator.eval.at_start",
    "orchestrator.mask_truncated_completions": "orchestrator.truncated",
    "orchestrator.advantage": "orchestrator.advantage",
    "orchestrator.training_mode": "algorithm",
    "orchestrator.val": "orchestrator.eval",
    "deployment.num_train_gpus": "trainer_gpu_ids",
    "deployment.num_infer_gpus": "inference_gpu_ids",
    "run.name": "output_dir",
    "run.dir": "output_dir",
    "resume.step": "resume",
    "resume.dir": "resume",
    "ckpt.resume_step": "resume",
    "log.json_logging": "log_format",
    "trainer.model.experimental.lora": "trainer.lora",
    "trainer.model.ac": "trainer.activation_checkpointing",
    "trainer.model.fsdp_cpu_offload": "trainer.optim.offload",
    "trainer.model.optim_cpu_offload": "trainer.optim.offload",
    "trainer.model.seq_len": "trainer.micro_batch_tokens",
    "trainer.optim.betas1": "trainer.optim.betas",
    "trainer.optim.betas2": "trainer.optim.betas",
    "trainer.scheduler.decay_steps": "trainer.scheduler.decay_fraction",
    "trainer.loss.dppo_mask_low": "trainer.loss.max_shift",
    "trainer.loss.dppo_mask_high": "trainer.loss.max_shift",
    "data.type": "data.fake",
    "data.loss_mask": "data.train_on",
    "data.splits": "data.split",
    "inference.vllm": "inference.vllm_args",
    "inference.model.tool_call_parser": "model.tool_calls",
}


@dataclass(frozen=True)
class Counterpart:
    """What a key of prime-rl is in Hone.

    Attributes:
        key: Hone's key; "" if there is none.
        why: why there is none.
        is_lost: True if Hone does not do what the key says.
    """

    key: str = ""
    why: str = ""
    is_lost: bool = False


def find_counterpart(key: str) -> Counterpart | None:
    """Return what a key of prime-rl, as `rl` spells it, is in Hone; None for other keys."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        known = ".".join(parts[:count])
        if known in RENAMED and count == len(parts):
            return Counterpart(RENAMED[known])
        if known in CHANGED:
            return Counterpart(CHANGED[known])
        if known in NEEDLESS:
            return Counterpart(why=NEEDLESS[known])
        if known in LOST:
            return Counterpart(why=LOST[known], is_lost=True)
    return None


def find_section(key: str) -> Counterpart | None:
    """Return what a section of prime-rl is in Hone, by its first key that has another name there."""
    below = [new for old, new in RENAMED.items() if old.startswith(f"{key}.")]
    return Counterpart(below[0].rpartition(".")[0]) if below else None
