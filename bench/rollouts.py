"""CPU time that a local rollout costs before its first model call: python bench/rollouts.py

Runs the controller as a user does (a process of its own, warm fork) with a Python harness that makes an openai client
and one call, to a stand-in for the gateway, in waves. When a call arrives, the stand-in reads from /proc what the
harness's process and its keeper have used, building and sending the request included. It answers when all calls of the
wave have come: all that controller and fork server have used since the wave began was used before the calls.
CPU time grows by half or more where other programs share the cores. Exit status 1 if the median total is over 20 ms.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

LIMIT_MS = 20.0
REPLY = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [
    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "42"}}]}


def harness(task: dict, workdir: Path) -> None:
    from openai import OpenAI

    reply = OpenAI().chat.completions.create(model=os.environ["MODEL_NAME"], user=str(os.getpid()), messages=[
        {"role": "system", "content": "Answer."}, {"role": "user", "content": task["answer"]}])
    (workdir / "result" / "answer").write_text(reply.choices[0].message.content)


def cpu_ms(pid: int) -> float:
    """CPU time of a process of one thread so far, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


def verify(task: dict, workdir: Path, turns: list[dict]) -> float:
    return float((workdir / "result" / "answer").read_text() == task["verifier"]["answer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=20, help="rollouts of a wave")
    options = parser.parse_args()
    from test_controller import Bench, FakeGateway, children, until  # not above: the forks need none of it

    gate, used = threading.Barrier(options.at_once + 1), []

    class MeasuringGateway(FakeGateway):
        def answer(self, path: str, body: dict) -> dict:
            if not path.startswith("/v1"):
                return super().answer(path, body)
            pid = int(body["user"])
            keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            used.append((cpu_ms(pid), cpu_ms(keeper)))
            gate.wait()
            return REPLY

    fork_ms = controller_ms = 0.0  # sums over all rollouts
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), MeasuringGateway())
        controller = bench.start("--preload", "rollouts", "--max-running", str(options.at_once))
        until(lambda: "rollouts at once" in (bench.run_dir / "log").read_text())
        server, = children(controller.pid)
        for _ in range(options.waves):
            fork_ms, controller_ms = fork_ms - cpu_ms(server), controller_ms - cpu_ms(controller.pid)
            rollouts = [bench.add("rollouts:harness", "rollouts:verify") for _ in range(options.at_once)]
            until(lambda: gate.n_waiting == options.at_once)
            fork_ms, controller_ms = fork_ms + cpu_ms(server), controller_ms + cpu_ms(controller.pid)
            gate.wait()
            reports = [bench.record(rollout)["report"] for rollout in rollouts]
            assert all(report["status"] == "succeeded" for report in reports), reports
        bench.stop()
    fork_ms, controller_ms = fork_ms / len(used), controller_ms / len(used)
    rows = {"harness process": [harness for harness, _ in used], "its keeper": [keeper for _, keeper in used],
            "fork server (mean)": [fork_ms], "controller (mean)": [controller_ms],
            "total": (totals := [harness + keeper + fork_ms + controller_ms for harness, keeper in used])}
    print(f"{len(used)} rollouts, {options.at_once} at once: ms of CPU before the first model call")
    for name, values in rows.items():
        p99 = sorted(values)[int(0.99 * len(values))]
        print(f"  {name:20} median {statistics.median(values):6.2f}   p99 {p99:6.2f}")
    sys.exit(statistics.median(totals) > LIMIT_MS)


if __name__ == "__main__":
    main()
