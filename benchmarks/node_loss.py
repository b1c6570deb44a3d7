"""Takes a node away from a job of four nodes: seconds until it trains again, and the steps that are computed again.

    python benchmarks/node_loss.py --write             # all cases; writes benchmarks/results/node_loss.md
    python benchmarks/node_loss.py --cases replaced    # one of them

Four network namespaces stand for the nodes: each has its own interface, address and memory folder (``/dev/shm``), and
runs ``torchrun`` with one gloo rank. They share the disk. Needs Linux, root and iproute2. The cases are in ``CASES``.
Losses are compared with those of the same run, undisturbed, on one node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kill_recovery import Job, last_step, resumptions_in, small_run
from measuring import parsed, parser_of, publish, table

from gecko.train import CheckpointSettings, ParallelSettings, train
from gecko.train.metrics import read_metrics

NODES, LOST, STEPS = 4, 2, 60
AFTER = 2
"""Steps from the middle of the run, where it evaluates, until the node is lost."""
PATIENCE = 240
"""Seconds without progress after which a job counts as lost."""
INTERFACE, PORT = "eth0", 29500
SETUP = 'mount -t tmpfs tmpfs /dev/shm; sysctl -qw net.ipv4.tcp_retries2=5; exec "$@"'
"""Commands that prepare a node. With five repetitions of a packet, a connection to a lost node ends after 13 s."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": INTERFACE,
    # PyTorch 2.13: else the other nodes keep the address of the first round, and a new node waits for it in its round.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    unplugged: bool
    """Whether the node's network is gone before its processes, as without power: its connections are not closed."""
    nodes: str
    """``--nnodes``."""
    settings: dict[str, ParallelSettings | CheckpointSettings | int]

    @property
    def replaced(self) -> bool:
        """Whether a new node joins when the node is lost."""
        return ":" not in self.nodes


_HSDP = {"parallel": ParallelSettings(replicate=2), "checkpoint": CheckpointSettings(every=20, memory_every=1)}
CASES = {
    "replaced": Case("killed, replaced; 2 × 2 ranks, copies in memory each step", False, "4", _HSDP),
    "no-power": Case("without power, replaced; 2 × 2 ranks, copies in memory each step", True, "4", _HSDP),
    "three-left": Case(
        "killed, not replaced; 4, then 3 shards, checkpoint each 7th step", False, "3:4",
        {"parallel": ParallelSettings(), "checkpoint": CheckpointSettings(every=7), "batch_size": 12},
    ),
}  # fmt: skip


def why_not() -> str | None:
    """Return why this machine cannot have network namespaces, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"gecko-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode == 0:
        made = subprocess.run(
            ["ip", "-n", name, "link", "add", "name", "try", "type", "bridge"], capture_output=True, text=True
        )
        _ip("netns", "delete", name)
    return None if made.returncode == 0 else f"ip cannot make network namespaces with a bridge: {made.stderr.strip()}"


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Node:
    """A network namespace with one interface, which a bridge connects with those of the other nodes."""

    def __init__(self, cluster: str, number: int) -> None:
        self.number, self.address = number, f"10.77.0.{number + 1}"
        self.space, self._switch, self._port = f"{cluster}-{number}", f"{cluster}-switch", f"port{number}"
        _ip("netns", "add", self.space)
        wire = ("link", "add", INTERFACE, "netns", self.space, "type", "veth")
        _ip(*wire, "peer", "name", self._port, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", self._port, "master", "bridge", "up")
        _ip("-n", self.space, "address", "add", f"{self.address}/24", "dev", INTERFACE)
        for interface in (INTERFACE, "lo"):
            _ip("-n", self.space, "link", "set", interface, "up")

    def start(self, nodes: str, head: Node, command: Sequence[str], log: Path) -> None:
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"),
            *(f"--local-addr={self.address}", "--rdzv-backend=c10d", f"--rdzv-endpoint={head.address}:{PORT}"),
            f"--rdzv-conf=is_host={int(self is head)},last_call_timeout=5",
            *("--rdzv-id=job", "--max-restarts=9", "--monitor-interval=0.1", *command),
        ]
        environment = {**os.environ, **ENVIRONMENT}
        with log.open("w", encoding="utf-8") as file:
            begin = ["ip", "netns", "exec", self.space, "sh", "-c", SETUP, "node"]
            subprocess.Popen([*begin, *torchrun], stdout=file, stderr=file, env=environment)

    def unplug(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def kill(self) -> None:
        """Kill all processes at once; their memory folder goes with them."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def processes(self) -> list[int]:
        return [int(line) for line in _ip("netns", "pids", self.space).split()]


@contextlib.contextmanager
def cluster() -> Iterator[list[Node]]:
    """Context with four connected nodes; the list may grow. At the end all processes are killed."""
    name = f"gecko-{os.getpid()}"
    _ip("netns", "add", f"{name}-switch")
    nodes: list[Node] = []
    try:
        _ip("-n", f"{name}-switch", "link", "add", "bridge", "type", "bridge")
        _ip("-n", f"{name}-switch", "link", "set", "bridge", "up")
        nodes += [Node(name, number) for number in range(NODES)]
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            _ip("netns", "delete", node.space)
        _ip("netns", "delete", f"{name}-switch")


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """Seconds from the loss until the first new step was finished."""
    finished: int
    """Last finished step when the node was lost."""
    resumed: int
    """Step after which the job continued."""
    difference: float
    """Largest relative difference of a step's loss to the undisturbed run."""


def lose_a_node(case: Case, folder: Path, steps: int = STEPS, undisturbed: int = NODES) -> Outcome:
    """Train twice, once with the loss of a node in the middle, and compare.

    Args:
        undisturbed: ranks of the other run; a single one trains in this process.

    Raises:
        RuntimeError: the job does not come back.
    """
    run = replace(small_run(folder, steps), **case.settings)
    recipe = folder / "run.json"
    run.save(recipe)
    alone = folder / "alone"
    if undisturbed == 1:
        train(replace(run, output=str(alone), parallel=ParallelSettings()))
    else:
        Job(recipe, alone, undisturbed, 0).wait()
    output = folder / "lost"
    command = ["-m", "gecko", "train", str(recipe), f"output={output}", "--resume"]
    with cluster() as nodes:
        logs = [folder / f"node-{number}.log" for number in range(NODES + 1)]
        for node in nodes:
            node.start(case.nodes, nodes[0], command, logs[node.number])
        _wait(lambda: last_step(output) >= steps // 2 + AFTER, logs)
        if case.unplugged:
            nodes[LOST].unplug()
        nodes[LOST].kill()
        begin, finished = time.monotonic(), last_step(output)
        if case.replaced:
            nodes.append(Node(f"gecko-{os.getpid()}", NODES))
            nodes[NODES].start(case.nodes, nodes[0], command, logs[NODES])
        _wait(lambda: resumed_at(logs) is not None and last_step(output) > (resumed_at(logs) or 0), logs)
        seconds, resumed = time.monotonic() - begin, resumed_at(logs)
        _wait(lambda: (output / "results.json").is_file() and not any(node.processes() for node in nodes), logs)
    assert resumed is not None
    pairs = zip(losses(alone, steps), losses(output, steps), strict=True)
    return Outcome(seconds, finished, resumed, max(abs(a - b) / a for a, b in pairs))


def _wait(happened: Callable[[], bool], logs: Sequence[Path]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > end:
            raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs if log.exists()))
        time.sleep(0.05)


def resumed_at(logs: Sequence[Path]) -> int | None:
    return max((step for log in logs for step in resumptions_in(log)), default=None)


def losses(output: Path, steps: int) -> list[float]:
    """Return the loss of every step; each must occur once."""
    records = [record for record in read_metrics(output / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    return [record["loss"] for record in records]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    given = parsed(parser)
    if (reason := why_not()) is not None:
        parser.error(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    rows = []
    for name in given.cases:
        with tempfile.TemporaryDirectory() as folder:
            one = lose_a_node(CASES[name], Path(folder))
        print(name, one, flush=True)
        again = max(0, one.finished - one.resumed)
        rows.append((CASES[name].name, one.seconds, one.finished, one.resumed, again, one.difference))
    publish(
        "node_loss.md", given, "A job that loses one of four nodes", "",
        f"Four network namespaces with one gloo rank each, under `torchrun --rdzv-backend c10d`, on this one machine, "
        f"whose cores start all processes. The third node is lost after step {STEPS // 2 + AFTER}. “Seconds” are from "
        "the loss to the first new step; a node that replaces it is started at once. A step is finished when the first "
        "rank has recorded it; the others may still be copying their shards. “Difference” is the largest relative "
        "difference of a step's loss to the undisturbed run.",
        table(["case", "seconds|.0f", "last finished step|,", "continued after step|,", "steps computed again|,",
               "difference|.1e"], rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
