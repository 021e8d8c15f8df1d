"""A real Slurm of two nodes on this machine, on the loopback interface, without systemd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import wait_until

_CONF = """
ClusterName=t
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmctldTimeout=10
SlurmdTimeout=20
InactiveLimit=0
KillWait=30
ReturnToService=2
NodeName=w1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={w1} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=w2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={w2} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=p Nodes=w1,w2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
"""
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")


def need_slurm() -> None:
    """Skips the test where Slurm is not installed, or may not be started."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    if os.geteuid() != 0 or any(shutil.which(name, path=path) is None for name in _PROGRAMS):
        pytest.skip("needs root and Debian's slurmctld, slurmd, slurm-client and munge")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid") if file.read_text().strip()]


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Starts one; yields what its clients' environment has to say."""
    ctld, w1, w2 = _free_ports(3)
    for name in ("state", "spool-w1", "spool-w2"):
        (folder / name).mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, ctld=ctld, w1=w1, w2=w2))
    environ = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def call(*command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    munge = Path("/run/munge")
    munge.mkdir(exist_ok=True)
    shutil.chown(munge, "munge", "munge")
    ours = not _alive(munge / "munged.pid")
    if ours:
        call("runuser", "-u", "munge", "--", "/usr/sbin/munged")
    try:
        call("slurmctld", "-f", str(conf), "-i")
        for node in ("w1", "w2"):
            call("slurmd", "-f", str(conf), "-N", node)
        wait_until(lambda: call("sinfo", "-h", "-o", "%T", check=False).split() == ["idle"], 60)
        yield {"SLURM_CONF": str(conf), "PATH": environ["PATH"]}
    finally:
        pids = _pids(folder)
        call("scontrol", "shutdown", check=False)
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if ours and _alive(munge / "munged.pid"):
            os.kill(int((munge / "munged.pid").read_text()), signal.SIGTERM)


def _alive(pid_file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return Path(f"/proc/{int(pid_file.read_text())}").exists()
    return False
