"""A Slurm of one node on this machine, with GPUs that are names of /dev/null; root and Debian's packages are needed.

munged, slurmctld and slurmd run without systemd, of a directory of their own, and end with `down`.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "munged", "mungekey")
CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.log
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
NodeName=node0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={slurmd} CPUs=64 RealMemory=65536 Gres=gpu:8
PartitionName=gpu Nodes=node0 Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
PartitionName=spot Nodes=node0 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=requeue GraceTime=0
"""


def is_possible() -> bool:
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    return os.geteuid() == 0 and all(shutil.which(name, path=path) for name in PROGRAMS)


class Cluster:
    """Use as a context manager; `environment` is what commands of Slurm need to find it."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.port = root, port
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
        for name in ("state", "spool", "log", "run", "dev"):
            (root / name).mkdir(parents=True)
        for number in range(8):
            os.mknod(root / "dev" / f"gpu{number}", 0o20666, os.makedev(1, 3))
        (root / "slurm.conf").write_text(CONF.format(root=root, port=self.port, slurmd=self.port + 1))
        (root / "gres.conf").write_text(f"NodeName=node0 Name=gpu File={root}/dev/gpu[0-7]\n")
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self._run("mungekey", "--create", "--keyfile", root / "run" / "munge.key")
        self._run(
            "munged", "--force", "--socket", root / "run" / "munge.socket", "--key-file", root / "run" / "munge.key",
            "--pid-file", root / "run" / "munged.pid", "--log-file", root / "log" / "munged.log", "--seed-file",
            root / "run" / "munged.seed",
        )  # fmt: skip
        self._run("slurmctld", "-f", root / "slurm.conf", "-c")
        self._run("slurmd", "-f", root / "slurm.conf", "-N", "node0")
        deadline = time.monotonic() + 60
        while "idle" not in self._run("sinfo", "-h", "-o", "%T", ok=False):
            assert time.monotonic() < deadline, (root / "log" / "slurmd.log").read_text()[-3000:]
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self._run("scancel", "-u", "root", ok=False)
        time.sleep(1.0)
        for name in ("slurmd", "slurmctld", "munged"):
            file = self.root / "run" / f"{name}.pid"
            if file.exists():
                os.kill(int(file.read_text()), 15)
                deadline = time.monotonic() + 20
                while file.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)

    def state(self, job: str) -> str:
        said = self._run("scontrol", "show", "job", job)
        return next(word for word in said.split() if word.startswith("JobState=")).removeprefix("JobState=")

    def control(self, *words: object) -> str:
        return self._run("scontrol", *words)

    def _run(self, *words: object, ok: bool = True) -> str:
        path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
        done = subprocess.run(
            list(map(str, words)), env={**os.environ, **self.environment, "PATH": path}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0 or not ok, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout
