"""A Slurm on this machine, of one node or of several in network namespaces, with GPUs that are names of /dev/null; root
and Debian's packages are needed.

munged, slurmctld and slurmd run without systemd, of a directory of their own, and end with `down`.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.hangs import HANG_SECONDS

from .namespaces import Nodes

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "munged", "mungekey")
CONF = """
ClusterName=test
SlurmctldHost=localhost({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
DefMemPerCPU=10
KillWait=5
OverTimeLimit=0
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=requeue GraceTime=0
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=64 RealMemory=65536 Gres=gpu:8"


def is_possible() -> bool:
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    return os.geteuid() == 0 and all(shutil.which(name, path=path) for name in PROGRAMS)


class Cluster:
    """Use as a context manager; `environment` is what commands of Slurm need to find it."""

    def __init__(self, root: Path, port: int, nodes: Nodes | None = None) -> None:
        self.root, self.port, self.nodes = root, port, nodes
        self.names = nodes.names if nodes else ["node0"]
        self.environment = {"SLURM_CONF": str(root / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        root = self.root
        for name in ("state", "log", "run", "dev", *(f"spool/{name}" for name in self.names)):
            (root / name).mkdir(parents=True)
        for number in range(8):
            os.mknod(root / "dev" / f"gpu{number}", 0o20666, os.makedev(1, 3))
        lines = [
            NODE.format(
                name=name,
                port=self.port + 1 + i,
                host=name if self.nodes else "localhost",
                address=self.nodes.address(i) if self.nodes else "127.0.0.1",
            )
            for i, name in enumerate(self.names)
        ]
        controller = f"{self.nodes.net}.1" if self.nodes else "127.0.0.1"
        conf = CONF.format(root=root, port=self.port, controller=controller, nodes="\n".join(lines))
        (root / "slurm.conf").write_text(conf)
        gres = "".join(
            f"NodeName={name} Name=gpu File={root}/dev/gpu[0-7]\n" for name in self.names
        )
        (root / "gres.conf").write_text(gres)
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self._run("mungekey", "--create", "--keyfile", root / "run" / "munge.key")
        self._run(
            "munged",
            "--force",
            "--socket",
            root / "run" / "munge.socket",
            "--key-file",
            root / "run" / "munge.key",
            "--pid-file",
            root / "run" / "munged.pid",
            "--log-file",
            root / "log" / "munged.log",
            "--seed-file",
            root / "run" / "munged.seed",
        )
        self._run("slurmctld", "-f", root / "slurm.conf", "-c")
        for i, name in enumerate(self.names):
            where = self.nodes.words(i) if self.nodes else []
            self._run(*where, "slurmd", "-f", root / "slurm.conf", "-N", name)
        deadline = time.monotonic() + HANG_SECONDS
        while (
            said := self._run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%T", ok=False)
        ).split() != ["idle"] * len(self.names):
            logs = (root / "log" / f"slurmd-{self.names[-1]}.log").read_text()
            assert time.monotonic() < deadline, said + logs[-3000:]
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self._run("scancel", "-u", "root", ok=False)
        time.sleep(1.0)
        for name in (*(f"slurmd-{node}" for node in self.names), "slurmctld", "munged"):
            file = self.root / "run" / f"{name}.pid"
            if file.exists():
                os.kill(int(file.read_text()), 15)
                deadline = time.monotonic() + HANG_SECONDS
                while file.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)

    def state(self, job: str) -> str:
        deadline = time.monotonic() + HANG_SECONDS
        # A busy controller does not answer in time, and scontrol then says nothing.
        while not (said := self._run("scontrol", "show", "job", job, ok=False)):
            assert time.monotonic() < deadline, f"scontrol says nothing of job {job}"
            time.sleep(0.5)
        return next(word for word in said.split() if word.startswith("JobState=")).removeprefix(
            "JobState="
        )

    def control(self, *words: object) -> str:
        return self._run("scontrol", *words)

    def bring_back(self, node: str) -> None:
        """A node that was set down takes jobs again. One that has registered since then does so without a word, and
        Slurm refuses to resume what is not down."""
        self._run("scontrol", "update", f"nodename={node}", "state=resume", ok=False)
        deadline = time.monotonic() + HANG_SECONDS
        while any(
            word in (said := self.control("show", "node", node))
            for word in ("State=DOWN", "+DRAIN")
        ):
            assert time.monotonic() < deadline, said
            time.sleep(0.5)

    def _run(self, *words: object, ok: bool = True) -> str:
        path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
        done = subprocess.run(
            list(map(str, words)),
            env={**os.environ, **self.environment, "PATH": path},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 0 or not ok, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout
