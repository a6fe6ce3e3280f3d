"""Harness of verifiers 0.4 that runs its chat program in the worker, instead of a process per rollout.

The worker of `verifiers_v1_worker.py` takes it for `null`, which runs no code of the model, in the
runtime `subprocess`. It runs without Hone installed. The program is verifiers' own, unchanged; what
is saved is a Python that imports its client for every rollout, more than a second of a processor.
"""

import contextvars
import functools
import ssl
import sys
import traceback
import types

from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessChatHarness"]
MESSAGES_FLAG = "--initial-messages-file="

_program_arguments = contextvars.ContextVar("program_arguments", default=())


class InProcessChatHarness(NullHarness):
    def __init__(self, config):
        super().__init__(config)
        self.runs_here = not config.resolved_env  # variables are for a process of its own

    async def setup(self, runtime):
        if not self.runs_here:
            await super().setup(runtime)

    async def launch(self, ctx, trace, runtime, *args, **kwargs):
        if self.runs_here:
            runtime = _ThisProcess(runtime)
        return await super().launch(ctx, trace, runtime, *args, **kwargs)


class _ThisProcess:
    """A runtime whose main program runs in this process; all else is the wrapped runtime's."""

    def __init__(self, runtime):
        self.runtime = runtime

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    async def prepare_uv_script(self, *args, **kwargs):
        return []

    async def run_program(self, argv, env):
        argv = [self._resolve_path(argument) for argument in argv]
        token = _program_arguments.set(argv)
        try:
            await load_chat_program().main()
        except SystemExit as stop:
            return ProgramResult(int(stop.code or 0), "", traceback.format_exc())
        except Exception:
            return ProgramResult(1, "", traceback.format_exc())
        finally:
            _program_arguments.reset(token)
        return ProgramResult(0, "", "")

    def _resolve_path(self, argument):
        """Return the argument with an absolute path; the program expects the rollout's directory."""
        if not argument.startswith(MESSAGES_FLAG):
            return argument
        return f"{MESSAGES_FLAG}{self.runtime.workdir / argument.removeprefix(MESSAGES_FLAG)}"


@functools.cache
def load_chat_program():
    """Return verifiers' chat program as a module that takes its arguments from the context."""
    program = types.ModuleType("verifiers_chat_program")
    sys.modules[program.__name__] = program
    exec(compile(CHAT_PROGRAM_SOURCE, program.__name__, "exec"), vars(program))
    parse_command_line = program.parse_args

    def parse_args():
        given = sys.argv
        sys.argv = ["chat", *_program_arguments.get()]
        try:
            return parse_command_line()
        finally:
            sys.argv = given

    program.parse_args = parse_args
    # Reading the certificates for each client would cost more than all the rest of a rollout.
    context = ssl.create_default_context(cafile=program.certifi.where())
    program.certifi = types.SimpleNamespace(where=lambda: context)
    return program
