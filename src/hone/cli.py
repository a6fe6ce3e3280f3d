"""Entry points of the commands: read the configuration, then run the command.

    sft, rl, inference     @ file.toml and dotted overrides (config/base.py)
    vf-eval                short flags (evals/arguments.py)
    hone                   the same commands as subcommands

Modules that import slowly are loaded only after `--help` is handled.
"""

import errno
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hone import STARTED, machine, preemption
from hone.child_process import end_with_parent
from hone.config.command_table import COMMANDS, import_object
from hone.process_report import claim_report_file, write_report
from hone.text.printable import make_printable

OTHERS = {  # subcommands with their own arguments
    "dashboard": "hone.dashboard.dashboard_commands:run_dashboard",
    "doctor": "hone.dashboard.dashboard_commands:run_doctor",
    "plot": "hone.dashboard.dashboard_commands:run_plot",
    "env": "hone.authoring.env_commands:main",
    "lab": "hone.launch.lab:main",
    "slurm": "hone.launch.slurm:main",
    "convert": "hone.config.convert:main",
}
STEPPING = ("rl", "vf-rl", "sft", "trainer")  # their first Ctrl-C writes a checkpoint
RANK_REPORT_SECONDS = 3.0  # in which the first rank of torchrun reports an error of all ranks
# These run without arguments or say what is missing.
LOOKERS = ("dashboard", "doctor", "plot")


def _make_entry(command: str) -> Callable[[], None]:
    return lambda: _exit_process(_run_command(command, sys.argv[1:]))


sft, rl, vf_rl, trainer, orchestrator, inference = map(
    _make_entry, ("sft", "rl", "vf-rl", "trainer", "orchestrator", "inference")
)


def vf_eval() -> None:
    from hone.evals.vf_eval import main

    machine.prepare_environment()
    # Exit through `finally` blocks, which end child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _exit_process(_guard_command("vf-eval", lambda: main(sys.argv[1:])))


def slurm() -> None:
    main = import_object(OTHERS["slurm"])
    _exit_process(_guard_command("medarc_slurm", lambda: main(sys.argv[1:] or ["--help"])))


def hone() -> None:
    names = [*COMMANDS, "vf-eval", "eval", *OTHERS]
    command, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if command in COMMANDS:
        _exit_process(_run_command(command, arguments))
    elif command == "vf-eval" or (command == "eval" and arguments[:1] == ["run"]):
        sys.argv = ["vf-eval", *arguments[command == "eval" :]]
        vf_eval()
    elif command == "eval":
        print(
            "usage: hone eval run ENV -m MODEL …   (vf-eval by another name; hone eval run --help)"
        )
        _exit_process(0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2)
    elif command in OTHERS:
        main = import_object(OTHERS[command])
        machine.prepare_environment()
        _exit_process(
            _guard_command(
                f"hone {command}",
                lambda: main(arguments or ([] if command in LOOKERS else ["--help"])),
            )
        )
    elif command in ("--help", "-h"):
        print("usage: hone COMMAND …\n")
        for name in COMMANDS:
            print(f"  {name:<12} {COMMANDS[name][2]}")
        print("  vf-eval      Evaluate a served model on an environment.")
        print("  eval run     The same.")
        print("  dashboard    Look at runs in a browser, start and stop them.")
        print("  doctor       Say what went wrong in a run.")
        print("  plot         Draw the curves of runs.")
        print("  env          Make, install, list and check environments.")
        print("  lab          Make a folder to train in; run job files of hosted training.")
        print("  convert      Turn configuration files of prime-rl into Hone's.")
        print("  slurm        Submit runs as jobs of Slurm, and look after them.")
        print("\n`hone COMMAND --help` lists its keys.")
    else:
        import difflib

        swapped = [name for name in names if sorted(name) == sorted(command)]
        near = (swapped or difflib.get_close_matches(command, names, n=1, cutoff=0.0))[0]
        print(
            f"hone: no command {command!r}; did you mean {near}? (commands: {', '.join(names)})",
            file=sys.stderr,
        )
        _exit_process(2)


def _run_command(command: str, argv: list[str]) -> int:
    config_path, main_path, summary = COMMANDS[command]
    config_class = import_object(config_path)
    if "--help" in argv or "-h" in argv:
        from hone.config.help import help_text

        return _guard_command(
            command, lambda: print(help_text(command, summary, config_class), flush=True)
        )

    machine.prepare_environment()
    claim_report_file()
    preemption.listen_for_signals()
    if command in STEPPING:
        preemption.listen_to_ctrl_c()
    end_with_parent()

    def call_command() -> None:
        from hone.config.base import load_config

        config = load_config(config_class, [word for word in argv if word != "--dry-run"])
        if "--dry-run" in argv:
            _dry_run(command, config.resolve_config())
        else:
            os.environ.setdefault(
                "HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1"
            )
            from hone.monitors.logging_setup import start_logging

            log = start_logging(config.log_level, getattr(config, "log_format", "text"))
            if "model" not in config.model_fields_set and hasattr(config, "model"):
                log.info("No model is named: it is %s", config.model.name)
            main = import_object(main_path)
            machine.started_in(time.perf_counter() - STARTED)
            machine.Neighbours.start_watching()
            try:
                main(config)
            except SystemExit as error:
                if error.code:  # set by our signal handlers
                    raise
                raise ValueError(
                    "something that the run called ended the process (exit()), perhaps a task of an environment"
                ) from error
            except Exception as error:
                # Torch's class, without importing torch.
                if type(error).__name__ != "OutOfMemoryError":
                    raise
                raise ValueError(_out_of_memory(error, config)) from error

    return _guard_command(command, call_command)


def _out_of_memory(error: Exception, config) -> str:  # type: ignore[no-untyped-def]
    """Return the message for an out-of-memory error: request, estimate, and keys that reduce it."""
    import torch

    from hone.launch.estimate import memory_lines
    from hone.models.device_memory import total_bytes

    card_bytes = total_bytes(torch.device("cuda")) if torch.cuda.is_available() else None
    said = ". ".join(str(error).split(". ")[:2]).removesuffix(".")
    lines = memory_lines(config.resolve_config(), card_bytes)
    expected = "".join(f"\n  about: {line}" for line in lines)
    return f"out of memory: {said}{expected}\n  keys that reduce memory: {config.MEMORY_KEYS}"


def _dry_run(command: str, config) -> None:  # type: ignore[no-untyped-def]
    from hone.config.help import to_toml
    from hone.launch.estimate import card_lines, memory_lines
    from hone.run_directory import RunDirectory

    text = to_toml(config)
    print(text, end="")
    for line in memory_lines(config):
        print(f"# memory, about: {line}")
    for line in card_lines(config):
        print(f"# on one GPU, {line}")
    if hasattr(config, "trainer_gpu_ids"):
        from hone.launch.plan import format_placement

        for line in format_placement(config, len(machine.usable_gpus())):
            print(f"# {line}")
    if hasattr(config, "clean"):  # commands that make a run
        run = RunDirectory(config.output_dir, "sft" if command == "sft" else "rl", config.layout)
        if run.earlier_run():
            print(f"# not written: {run.path} holds an earlier {run.command} run")
        else:
            run.check_claim(clean=False)
            print(f"# written to {run.write_config(text, command)}")


def _guard_command(command: str, work: Callable[[], int | None]) -> int:
    """Run a command. Users' mistakes become one message and exit code 1, Ctrl-C exit code 130."""
    from hone.run_directory import UserError

    try:
        return work() or 0
    except preemption.Preempted as left:
        write_report(preempted=str(left), can_resume=left.can_resume)
        print(f"{command}: {left}", flush=True)
        if not preemption.was_interrupted():
            return preemption.EXIT_PREEMPTED
        if left.can_resume:
            print(f"continue with: {resume_command(sys.argv)}", flush=True)
        return preemption.EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return preemption.EXIT_INTERRUPTED
    except BrokenPipeError:  # `… | head`: the reader is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        return _print_error(command, make_printable(str(error)))
    except Exception as error:
        if not is_disk_full(error):
            write_report(error=f"{type(error).__name__}: {error}")
            raise
        message = "the disk is full; make room, then --resume auto continues the run"
        return _print_error(command, message)


def _print_error(command: str, message: str) -> int:
    """Print a user error to standard error, add it to the report, and return exit code 1."""
    write_report(error=message)
    print(f"{command}: error: {message}", file=sys.stderr)
    if os.environ.get("RANK", "0") != "0":
        # torchrun ends all ranks with the first that fails; the first rank's output is shown.
        time.sleep(RANK_REPORT_SECONDS)
    return 1


def resume_command(argv: list[str]) -> str:
    """Return the command line that resumes this command."""
    program = Path(argv[0])
    words = argv[1:]
    start = ["python", "-m", "hone"] if program.name == "__main__.py" else [program.name]
    if "UV_RUN_RECURSION_DEPTH" in os.environ:
        start = ["uv", "run", *start]
    kept = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name = word.partition("=")[0]
        if name not in ("--clean", "--resume", "--no-clean"):
            kept.append(word)
        elif "=" not in word and rest and not rest[0].startswith(("-", "@")):
            rest.pop(0)
    return shlex.join([*start, *kept, "--resume", "auto"])


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if a full disk caused the error; libraries wrap or reword it."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(
            errno.ENOSPC
        ) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _exit_process(code: int) -> None:
    preemption.ignore_from_now_on()
    sys.stdout.flush()
    # torch's threads may abort one of several ranks during normal shutdown.
    if os.environ.get("WORLD_SIZE", "1") != "1":
        import logging

        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
