"""Worker for environments of verifiers' v1 API (verifiers 0.4); it runs without Hone installed.

`verifiers_worker.py` starts it where that version is installed. A rollout is one episode: verifiers
runs the harness in its runtime, and the harness asks the rollout's own OpenAI endpoint.
"""

import asyncio
import inspect
import itertools
import os
import shutil
import sys

# Refused unless allowed: what the model writes would run on this machine, uncontained.
ALLOW = "allow_code_on_this_machine"
LIMIT = "limit"  # most tasks to load; of an endless taskset ENDLESS_TASKS
ENDLESS_TASKS = 1000
KEY_VARIABLE = "HONE_POLICY_KEY"


def build_config(name, arguments):
    """Return verifiers' configuration of an environment, and the arguments that are Hone's.

    `arguments` is the content of verifiers' [env] table. A role without a harness gets `null`, a
    chat with the model, and one without a runtime `subprocess`.
    """
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    data = dict(arguments)
    own = {key: data.pop(key) for key in (ALLOW, LIMIT) if key in data}
    data["taskset"] = {"id": name, **(data.get("taskset") or {})}
    for role, agent in agent_config_fields(vf.resolve_env_config(dict(data))).items():
        given = dict(data.get(role) or {})
        if "runtime" not in agent.model_fields_set:
            given["runtime"] = {"type": "subprocess"}
        if agent.harness is None:
            given["harness"] = {"id": find_default_harness(name)}
        data[role] = run_chat_in_process(given, agent)
    return vf.resolve_env_config(data), own


def run_chat_in_process(given, agent):
    """Return a role's settings with the harness of in_process_chat.py where `null` needs no process."""
    harness = given.get("harness") or agent.harness.model_dump(exclude_unset=True)
    runtime = given.get("runtime") or agent.runtime.model_dump(exclude_unset=True)
    if harness.get("id") == "null" and runtime.get("type") == "subprocess":
        given["harness"] = {**harness, "id": "in-process-chat"}
    return given


def find_default_harness(name):
    """Return the harness that a taskset's package brings, or `null`."""
    from verifiers.v1.utils.loaders import default_harness_id

    found = default_harness_id(name)
    return "null" if found == "bash" else found


def refuse_uncontained_code(environment):
    """Raise ValueError if a harness or a task runs what the model writes on this machine."""
    hooks = find_runtime_hooks(type(environment.taskset).task_type())
    for role, harness in environment._harnesses.items():
        if environment._agent_specs[role].runtime.type != "subprocess":
            continue
        remedy = f"set {role}.runtime.type to docker or podman, or allow it on this machine: {ALLOW} = true"
        if harness.EXECUTES_CODE:
            raise ValueError(
                f"{role}.harness.id {harness.config.id!r} runs what the model writes; take the harness null, {remedy}"
            )
        if hooks:
            raise ValueError(
                f"{', '.join(hooks)} can run what the model writes, in the runtime of {role}: {remedy}"
            )


def find_runtime_hooks(task_type):
    """Return the names of a task's methods that receive the runtime once the model has written."""
    from verifiers.v1 import Task

    kinds = ("reward", "metric", "stop", "intercept")
    found = []
    for name in dir(task_type):
        method = getattr(task_type, name)
        is_hook = callable(method) and any(hasattr(method, kind) for kind in kinds)
        is_hook = is_hook or (name == "finalize" and method is not Task.finalize)
        if is_hook and "runtime" in inspect.signature(method).parameters:
            found.append(f"{task_type.__name__}.{name}")
    return found


def describe_task(task):
    """Return a row of the protocol: the prompt as messages, and the task's data."""
    from verifiers.v1.dialects.chat import message_to_wire

    data = task.data.model_dump(mode="json")
    prompt = task.data.prompt or []
    is_text = isinstance(prompt, str)
    messages = (
        [{"role": "user", "content": prompt}] if is_text else list(map(message_to_wire, prompt))
    )
    if data.get("system_prompt"):
        messages = [{"role": "system", "content": data["system_prompt"]}, *messages]
    answer = data.get("answer")
    return {
        "example_id": data["idx"],
        "prompt": messages,
        "answer": answer if isinstance(answer, str) else "",
        "task": data.get("name") or "",
        "data": data,
    }


class V1Worker:
    def __init__(self, environment, limit):
        self.environment = environment
        self.limit = limit
        self.serving = None  # starts with the first rollout, on the worker's loop

    def list_examples(self):
        taskset = self.environment.taskset
        limit = self.limit or (None if taskset.bounded else ENDLESS_TASKS)
        rows = [describe_task(task) for task in itertools.islice(iter(taskset), limit)]
        return {"groups": False, "train": rows, "eval": rows}

    async def start_serving(self):
        """Start what the episodes share, once; tool servers and the interception server."""
        if self.serving is None:
            ready = asyncio.get_running_loop().create_future()
            self.serving = (asyncio.create_task(self.keep_serving(ready)), ready)
        await asyncio.shield(self.serving[1])

    async def keep_serving(self, ready):
        try:
            async with self.environment.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    async def rollout(self, message):
        import verifiers.v1 as vf

        await self.start_serving()
        os.environ[KEY_VARIABLE] = "none"
        client = vf.EvalClientConfig(base_url=message["url"], api_key_var=KEY_VARIABLE)
        given = {k: v for k, v in message["sampling"].items() if k != "n"}
        context = vf.ModelContext(
            client=client, model=message["model"], sampling=vf.SamplingConfig.model_validate(given)
        )
        (slot,) = self.environment.slots(self.build_task(message["row"]["data"]))
        episode = await self.environment.run_slot(slot, context)
        return describe_episode(episode, list(self.environment._agent_specs))

    def build_task(self, data):
        kind = type(self.environment.taskset).task_type()
        return kind(kind.data_type().model_validate(data), self.environment.config.taskset.task)


def describe_episode(episode, roles):
    """Return the result of the protocol, a list of agents in the order of `roles`.

    Raises RuntimeError for an episode that failed.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        found = errors[-1] if errors else None
        raise RuntimeError("it failed" if found is None else f"{found.type}: {found.message}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not trained:
        raise RuntimeError("the episode has no agent that is trainable")
    trained.sort(key=lambda trace: roles.index(trace.agent.name))
    agents = [describe_trace(trace) for trace in trained]
    if len(agents) == 1:
        agents[0]["agent"] = ""
    return {"agents": agents}


def describe_trace(trace):
    """Return the result of one agent; `session` names its requests to the policy's endpoint."""
    from verifiers.v1.dialects.chat import message_to_wire

    metrics = {key: reward.value for key, reward in trace.rewards.items() if reward is not None}
    metrics |= {key: value for key, value in trace.metrics.items() if value is not None}
    messages = [message_to_wire(one) for one in trace.messages]
    if trace.task.data.prompt:  # which the example has
        messages = itertools.dropwhile(lambda one: one.get("role") != "assistant", messages)
    return {
        "agent": trace.agent.name,
        "messages": list(messages),
        "reward": trace.reward,
        "metrics": metrics,
        "stop": trace.stop_condition or "",
        "session": trace.id,
    }


def describe_error(error):
    """Return a configuration error in one line, with the key under env.args."""
    found = error.errors()[0] if hasattr(error, "errors") else None
    if found is None:
        return " ".join(str(error).split())
    return f"env.args.{'.'.join(map(str, found['loc']))}: {found['msg']}"


def serve(loop, name, is_serving):
    """List the examples, or serve rollouts until the parent ends."""
    from forked_tools import fork_tool_servers
    from verifiers.v1.utils.loaders import load_environment

    # uv may be installed beside this Python
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    if shutil.which("uv") is None:
        raise SystemExit(
            "verifiers 0.4 starts harnesses with uv, which is not on PATH: pip install uv"
        )
    try:
        config, own = build_config(name, loop.arguments)
        environment = load_environment(config)
        if own.get(ALLOW) is not True:
            refuse_uncontained_code(environment)
    except ValueError as error:
        raise SystemExit(describe_error(error)) from None
    worker = V1Worker(environment, own.get(LIMIT))
    if not is_serving:
        loop.send_message(worker.list_examples())
        os._exit(0)
    fork_tool_servers()
    loop.serve_requests({"rollout": worker.rollout})
