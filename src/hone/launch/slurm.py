"""`hone slurm sft|rl CONFIG …`: submit a run as a Slurm job that survives preemption.

    CONFIG, options ─► DIR/configs/{sft,rl}.toml, DIR/{sft,rl}.sh ─ sbatch ─► job: `rl @ configs/rl.toml`, --resume auto
                       DIR/slurm/jobs.jsonl ◄─ the job's number              on USR1: checkpoint, exit, requeue, resume

The command is also installed as `medarc_slurm`. No shell reads the user's values: options are
arguments of sbatch, and values in the script are quoted.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config.base import ConfigError, load_config
from hone.config.help import to_toml
from hone.config.rl_config import RLConfig
from hone.config.sections import API_KEY_VARIABLE
from hone.config.sft_config import SFTConfig
from hone.launch.plan import format_placement
from hone.monitors.metrics_log import read_rows
from hone.run_directory import rewrite_file

TEMPLATE = Path(__file__).parent / "slurm.sh.jinja"
# Values that an #SBATCH line can hold unquoted.
PLAIN = re.compile(r"[\w./:@%+=,^\[\]-]+", re.ASCII)
CHECKPOINT_INTERVAL = 50  # default checkpoint interval in steps, so that a job can resume
OPTIONS = ("account", "partition", "time", "qos", "mem", "mail_user", "constraint", "dependency")
STATES = "%i|%T|%M|%R"
COMMAND_SECONDS = 60.0  # seconds that a Slurm command may take


def main(argv: list[str] | None = None) -> int:
    args, overrides = parse_arguments(sys.argv[1:] if argv is None else argv)
    if args.command in ("sft", "rl"):
        return submit_job(args, overrides)
    if overrides:
        raise ValueError(f"hone slurm {args.command}: unknown: {' '.join(overrides)}")
    return {"status": show_status, "logs": show_logs, "cancel": cancel_jobs}[args.command](args)


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="hone slurm", description="Runs of sft and rl as jobs of Slurm.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, words in (("sft", "Submit supervised fine-tuning."), ("rl", "Submit RL.")):
        one = commands.add_parser(
            name,
            help=words,
            description=f"{words} Keys of the configuration may follow, as --max-steps 10.",
            allow_abbrev=False,
        )
        _add_run_options(one.add_argument)
        _add_machine_options(one.add_argument_group("machines").add_argument, name)
        _add_scheduler_options(one.add_argument_group("Slurm").add_argument, name)
    for name, words in (
        ("status", "State of a run's jobs, its step and reward."),
        ("logs", "Show a run's newest log."),
        ("cancel", "End a run's jobs."),
    ):
        one = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        one.add_argument("run", type=Path, help="its --output-dir")
        if name == "logs":
            one.add_argument(
                "-n", "--lines", type=parse_count, default=50, help="lines (default 50)"
            )
    return parser.parse_known_args(argv)


def _add_run_options(add: Callable[..., Any]) -> None:
    add("config", help="TOML file")
    add(
        "--output-dir",
        type=Path,
        required=True,
        help="directory of the run, on a disk that the nodes share",
    )
    add(
        "--chain",
        type=parse_count,
        default=1,
        help="jobs that go on after each other (default 1)",
    )
    add(
        "--grace",
        type=parse_count,
        default=120,
        help="seconds before the end of the wall time to save in (default 120)",
    )
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further option of sbatch",
    )
    add("--hf-hub-offline", action="store_true", help="use what the hub's cache has")
    add("--dry-run", action="store_true", help="write and show everything, submit nothing")


def _add_machine_options(add: Callable[..., Any], name: str) -> None:
    if name == "sft":
        add("--gpus", type=parse_count, required=True, help="GPUs of a node, 1 to 8")
        add(
            "--nodes",
            type=parse_count,
            default=1,
            help="nodes that train one model together (default 1)",
        )
    else:
        add("--train-gpus", type=parse_count, default=1, help="GPUs that train (default 1)")
        add("--infer-gpus", type=parse_count, default=1, help="GPUs that sample (default 1)")
        add("--single-gpu", action="store_true", help="one GPU that does both")
        add(
            "--train-nodes",
            type=parse_count,
            help="nodes that train, each with this many --train-gpus; needs --infer-nodes",
        )
        add(
            "--infer-nodes",
            type=parse_count,
            help="nodes that sample, each with this many --infer-gpus",
        )
    add(
        "--cpus-per-gpu",
        type=parse_count,
        default=8,
        help="processor cores for each GPU (default 8)",
    )


def _add_scheduler_options(add: Callable[..., Any], name: str) -> None:
    add("--job-name", help=f"default: the file's name and -{name}")
    add("--account", help="default: $SBATCH_ACCOUNT, then $SLURM_ACCOUNT")
    for option, words in (
        ("partition", "where to run"),
        ("time", "wall time, as in 4:00:00"),
        ("qos", "quality of service"),
        ("mem", "memory of the node, as in 64G"),
        ("mail-user", "address that is written to when the job ends"),
        ("constraint", "features that the node must have"),
        ("dependency", "as Slurm has it: afterok:123"),
    ):
        add(f"--{option}", help=words)


def parse_count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be 1 or more, found {text}")
    return int(text)


# ---------------------------------------------------------------------------------------------- submitting


def submit_job(args: argparse.Namespace, overrides: list[str]) -> int:
    gpus = gpus_of(args)
    nodes = nodes_of(args)
    directory = args.output_dir.absolute()
    if "\\" in str(directory):
        raise ValueError(
            f"--output-dir {directory}: Slurm writes no log below a directory with a backslash in its name"
        )
    config = resolve_config(args, overrides, directory)
    file = directory / "configs" / f"{args.command}.toml"
    script = directory / f"{args.command}.sh"
    try:
        (directory / "configs").mkdir(parents=True, exist_ok=True)
        (directory / "slurm").mkdir(exist_ok=True)
        # The job has no other source of secrets.
        rewrite_file(file, to_toml(config, with_secrets=True), mode=0o600)
        options = sbatch_options(args, gpus, sum(nodes), directory)
        script.write_text(render_script(args, gpus, nodes, file, options))
        script.chmod(0o755)
    except OSError as error:
        raise ValueError(
            f"--output-dir {directory} cannot be written to: {error.strerror}"
        ) from None
    given = [
        word
        for name, value in options
        if not PLAIN.fullmatch(value)
        for word in (f"--{name}", value)
    ]
    if args.dry_run:
        if isinstance(config, RLConfig):
            print("\n".join(format_placement(on_nodes(config, nodes), gpus, "node 1")))
        else:
            print("component  node    devices")
            for i in range(sum(nodes)):
                print(f"sft        node {i + 1}  GPU 0{f' to {gpus - 1}' if gpus > 1 else ''}")
        print(f"\n# {script}\n{script.read_text()}")
        print(f"configuration: {file}")
        _print_sbatch_test(script, given)
        return 0
    _submit_chain(script, given, args.chain, directory / "slurm")
    return 0


def _print_sbatch_test(script: Path, given: list[str]) -> None:
    if not shutil.which("sbatch"):
        print("Slurm says: nothing, there is no sbatch here")
        return
    done = run_slurm_command(["sbatch", "--test-only", *given, str(script)])
    print("Slurm says:", (done.stderr or done.stdout).strip() or "nothing")


def _submit_chain(script: Path, given: list[str], count: int, directory: Path) -> None:
    """Submit a script as `count` jobs, each of which waits for the end of the job before.

    `given` are sbatch arguments. Raises ValueError if sbatch fails.
    """
    if not shutil.which("sbatch"):
        raise ValueError(
            f"there is no sbatch here; {script} is written and can be submitted where there is one"
        )
    before = ""
    for _ in range(count):
        wait = [f"--dependency=afterany:{before}"] if before else []
        done = run_slurm_command(["sbatch", "--parsable", *given, *wait, str(script)])
        if done.returncode:
            raise ValueError(f"sbatch: {done.stderr.strip().removeprefix('sbatch: error: ')}")
        before = done.stdout.strip().split(";")[0]
        row = {"job": before, "submitted": time.strftime("%Y-%m-%d %H:%M:%S")}
        with (directory / "jobs.jsonl").open("a") as known:
            known.write(json.dumps(row) + "\n")
        print(f"Submitted job {before}: {script}")
    print(f"log: {directory / f'job_{before}.log'}")


def nodes_of(args: argparse.Namespace) -> list[int]:
    """Return [training nodes], or [training nodes, inference nodes] if inference has nodes of its
    own.
    """
    if args.command == "sft":
        return [args.nodes]
    if args.train_nodes is None and args.infer_nodes is None:
        return [1]
    if args.single_gpu:
        raise ValueError(
            "--single-gpu: one GPU is on one node; leave --train-nodes and --infer-nodes out"
        )
    if args.train_nodes is None or args.infer_nodes is None:
        raise ValueError(
            "--train-nodes and --infer-nodes: give both; servers and trainer have nodes of their own then"
        )
    return [args.train_nodes, args.infer_nodes]


def on_nodes(config: RLConfig, nodes: list[int]) -> RLConfig:
    """Return the configuration with placeholder node names, to show the plan before the job."""
    if len(nodes) == 1:
        return config
    train, infer = (
        [f"node {i + 1}" for i in range(start, start + count)]
        for start, count in ((0, nodes[0]), nodes)
    )
    os.environ.setdefault(API_KEY_VARIABLE, "of the job")
    return config.model_copy(update={"trainer_nodes": train, "inference_nodes": infer})


def gpus_of(args: argparse.Namespace) -> int:
    """Return the number of GPUs per node."""
    if args.command == "sft":
        if args.gpus > 8:
            raise ValueError(f"--gpus {args.gpus}: a node has up to 8")
        return int(args.gpus)
    if args.single_gpu:
        return 1
    if args.train_nodes or args.infer_nodes:
        if max(args.train_gpus, args.infer_gpus) > 8:
            raise ValueError(
                f"--train-gpus {args.train_gpus}, --infer-gpus {args.infer_gpus}: a node has up to 8"
            )
        return int(max(args.train_gpus, args.infer_gpus))
    if args.train_gpus + args.infer_gpus > 8:
        raise ValueError(
            f"--train-gpus {args.train_gpus} and --infer-gpus {args.infer_gpus}: a node has up to 8"
        )
    return int(args.train_gpus + args.infer_gpus)


def resolve_config(args: argparse.Namespace, overrides: list[str], directory: Path) -> Any:
    """Build the job's configuration from file, overrides and GPUs; set `resume` to "auto"."""
    words = ["@", args.config, *overrides, "--output-dir", str(directory)]
    if args.command == "sft":
        config: Any = load_config(SFTConfig, words)
    else:
        if args.single_gpu:
            devices = {"deployment": "colocated", "inference_gpu_ids": [0], "trainer_gpu_ids": [0]}
        else:
            first = 0 if args.train_nodes else args.infer_gpus
            devices = {
                "inference_gpu_ids": list(range(args.infer_gpus)),
                "trainer_gpu_ids": list(range(first, first + args.train_gpus)),
            }
        words += [
            word for key, value in devices.items() for word in (f"--{key}", _quote_word(value))
        ]
        if not args.single_gpu:
            words += [
                "--deployment",
                "processes",
                "--inference.server.port",
                "0",
                "--inference.server.host",
                "127.0.0.1",
            ]
            one = load_config(RLConfig, words).inference
            share = one.tensor_parallel_size * one.data_parallel_size if one is not None else 1
            if args.infer_gpus % share:
                raise ConfigError(
                    f"--infer-gpus {args.infer_gpus} is not a multiple of {share}, the GPUs of a server"
                )
            words += [
                "--inference-replicas",
                str(args.infer_gpus // share * (args.infer_nodes or 1)),
            ]
        config = load_config(RLConfig, words)
    if config.clean:
        raise ConfigError(
            f"clean: a job that is started again would lose its run; remove it from {args.config}"
        )
    changes: dict[str, Any] = {"resume": "auto"}
    if config.ckpt is None or config.ckpt.interval is None:
        # At least as often as weights: a run with weights but no checkpoint is not restarted
        # without asking.
        changes["ckpt"] = {
            "interval": min(CHECKPOINT_INTERVAL, config.weights.interval or CHECKPOINT_INTERVAL)
        }
    return type(config).model_validate(config.model_dump() | changes)


def _quote_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def sbatch_options(
    args: argparse.Namespace, gpus: int, nodes: int, directory: Path
) -> list[tuple[str, str]]:
    """Return the sbatch options of a job, as (name, value) pairs."""
    log = str(directory / "slurm").replace("%", "%%") + "/job_%j.log"
    found = [
        ("job-name", args.job_name or f"{Path(args.config).stem}-{args.command}"),
        ("nodes", str(nodes)),
        ("ntasks-per-node", "1") if nodes > 1 else ("ntasks", "1"),
        ("gres", f"gpu:{gpus}"),
        ("cpus-per-gpu", str(args.cpus_per_gpu)),
        ("output", log),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{args.grace}"),
    ]
    account = args.account or os.environ.get("SBATCH_ACCOUNT") or os.environ.get("SLURM_ACCOUNT")
    values = vars(args) | {"account": account}
    found += [(name.replace("_", "-"), values[name]) for name in OPTIONS if values[name]]
    if args.mail_user:
        found.append(("mail-type", "END,FAIL,REQUEUE"))
    for one in args.sbatch:
        name, has_value, value = one.partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", name) or not has_value:
            raise ValueError(f"--sbatch {one!r}: write it as KEY=VALUE, as in --sbatch nice=100")
        found.append((name, value))
    return found


def render_script(
    args: argparse.Namespace,
    gpus: int,
    nodes: list[int],
    file: Path,
    options: list[tuple[str, str]],
) -> str:
    from jinja2 import Environment, StrictUndefined

    command = [sys.executable, "-P", "-m", "hone", args.command, "@", str(file)]
    several = ["--nodes", str(nodes[0])] if args.command == "sft" and nodes[0] > 1 else []
    if args.command == "sft" and (gpus > 1 or several):
        command = [
            sys.executable,
            "-P",
            "-m",
            "hone.launch.rank_launcher",
            "--ranks",
            str(gpus),
            *several,
        ]
    rest = [args.command, "@", str(file)] if "hone.launch.rank_launcher" in command else []
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["quoted"] = shlex.quote
    return environment.from_string(TEMPLATE.read_text()).render(
        options=[(name, value) for name, value in options if PLAIN.fullmatch(value)],
        others=[f"--{name}={value!a}" for name, value in options if not PLAIN.fullmatch(value)],
        directory=str(args.output_dir.absolute()),
        place=str(Path.cwd()),
        command=command,
        rest=rest,
        nodes=nodes,
        kind=args.command,
        offline=args.hf_hub_offline,
    )


# ---------------------------------------------------------------------------------------------- looking after


def jobs_of(run: Path) -> list[str]:
    """Return the job numbers of a run. Raises ValueError if there are none."""
    file = run / "slurm" / "jobs.jsonl"
    found = [str(row["job"]) for row in read_rows(file)]
    if not found:
        raise ValueError(
            f"{run} has no job: {file} is not there; it is the --output-dir of `hone slurm sft` or `rl`"
        )
    return found


def show_status(args: argparse.Namespace) -> int:
    for job in jobs_of(args.run):
        done = run_slurm_command(
            ["squeue", "--noheader", "--states=all", "--jobs", job, "--format", STATES]
        )
        words = (
            done.stdout.strip().split("|")
            if done.returncode == 0 and done.stdout.strip()
            else [job, "GONE", "", ""]
        )
        print(f"job {words[0]}  {words[1]}  {words[2]}  {words[3]}".rstrip())
    rows = [
        row for name in ("metrics.jsonl", "metrics_sft.jsonl") for row in read_rows(args.run / name)
    ]
    if rows:
        last = rows[-1]
        value = (
            f"reward {last['reward/mean']:.4f}"
            if "reward/mean" in last
            else f"loss {last.get('loss/mean', 0):.4f}"
        )
        print(f"step {last['step']}  {value}")
    return 0


def show_logs(args: argparse.Namespace) -> int:
    files = sorted((args.run / "slurm").glob("job_*.log"), key=lambda path: path.stat().st_mtime)
    if not files:
        jobs = ", ".join(jobs_of(args.run))
        raise ValueError(f"{args.run}: job {jobs} has written no log yet")
    lines = files[-1].read_text(errors="replace").splitlines()
    print(f"# {files[-1]}")
    print("\n".join(lines[-args.lines :]))
    return 0


def cancel_jobs(args: argparse.Namespace) -> int:
    jobs = jobs_of(args.run)
    done = run_slurm_command(["scancel", *jobs])
    if done.returncode:
        raise ValueError(f"scancel: {done.stderr.strip()}")
    print(f"cancelled: {', '.join(jobs)}")
    return 0


def run_slurm_command(words: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a Slurm command and return its result, whatever its exit code.

    Raises ValueError if the command is missing or does not answer in time.
    """
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise ValueError(
            f"there is no {words[0]} here; is this a machine of a Slurm cluster?"
        ) from None
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{words[0]} has not answered for {COMMAND_SECONDS:.0f} s; is slurmctld up?"
        ) from None
