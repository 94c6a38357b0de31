"""A real Slurm of one machine (Debian's slurm-wlm and munge), started for a test and stopped after it, apart from the system's own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.e2e.program import ROOT
from tests.ranks import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
PATH = os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin"
# Accounting, cgroups and topology are off. cred_expire: a requeued job waits that long, 120 s otherwise.
CONFIG = """
ClusterName=megaflow-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.log
SlurmctldPort={controller_port}
SlurmdPort={node_port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
"""


def missing() -> list[str]:
    """What the machine lacks: programs, and a name that resolves, by which the ranks of a job find each other."""
    programs = [name for name in DAEMONS + COMMANDS if shutil.which(name, path=PATH) is None]
    try:
        socket.gethostbyname(socket.gethostname().split(".")[0])
    except OSError:
        return [*programs, "a host name that resolves"]
    return programs


class SlurmCluster:
    """One node, as many CPUs as the machine has. `base` must have a short path: munge's socket lies in it."""

    def __init__(self, base: Path):
        self.base = base
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        self.env |= {"PATH": PATH, "SLURM_CONF": str(base / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> SlurmCluster:
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (self.base / name).mkdir()
        (self.base / "munge.key").write_bytes(os.urandom(1024))
        (self.base / "munge.key").chmod(0o400)
        values = {"host": host, "user": getpass.getuser(), "base": self.base, "cpus": os.cpu_count()}
        values |= {"controller_port": free_port(), "node_port": free_port()}
        (self.base / "slurm.conf").write_text(CONFIG.format(**values))
        files = {name: f"--{name}-file={self.base}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        try:
            self._start("munged", "--foreground", "--force", f"--socket={self.base}/munge.socket", *files.values())
            self._wait(lambda: (self.base / "munge.socket").exists(), "munge's socket")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D", "-N", host)
            self._wait(lambda: "idle" in self.call("sinfo", "--noheader", "--format=%T", check=False), "an idle node")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, *command: str) -> None:
        with (self.base / f"{command[0]}.out").open("w") as out:
            self._daemons.append(subprocess.Popen(command, env=self.env, cwd=self.base, stdout=out, stderr=subprocess.STDOUT))

    def _wait(self, condition, what: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            ended = [d.args[0] for d in self._daemons if d.poll() is not None]
            logs = "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1000:]}" for p in self.base.glob("*.out"))
            assert not ended and time.monotonic() < deadline, f"no {what}; ended: {ended}\n{logs}"
            time.sleep(0.1)

    def call(self, *command: str, check: bool = True) -> str:
        """A Slurm command's output."""
        done = subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str) -> str:
        """sbatch; the job's number."""
        return self.call("sbatch", "--parsable", *arguments)

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job: JobState, ExitCode, Restarts..."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, state: str, timeout: float) -> dict[str, str]:
        """Until the job is in `state`; fails when it ends in another."""
        deadline = time.monotonic() + timeout
        while (found := self.job(number))["JobState"] != state:
            ended = found["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            assert not ended and time.monotonic() < deadline, f"job {number} is {found['JobState']}, not {state}: {found}"
            time.sleep(0.2)
        return found

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) == len(DAEMONS):
            self.call("scancel", "--user", getpass.getuser(), check=False)
            time.sleep(1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
