"""`make demo`: a cluster of one prefill and one decode worker answers one question, shows the path, and is gone.

python -m examples.demo [--model MODEL] [QUESTION]
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from cluster.model_store import resolve
from engine.config_file import read_config
from engine.kv_cache import PAGE_TOKENS

READY_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
CLI = (sys.executable, "-m", "cluster.cli")


def main() -> None:
    """Start, ask, show, stop, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready.json"
        began = time.perf_counter()
        up = subprocess.Popen([*CLI, "up", "--model", arguments.model, "--ready-file", str(ready_file)])
        try:
            address = wait_until_ready(up, ready_file)
            print(f"ready after {time.perf_counter() - began:.1f} s\n", flush=True)
            answer = ask(address, arguments.question)
            family = psutil.Process(up.pid).children(recursive=True)
        finally:
            code = stop(up)
    show(arguments.question, answer, token_bytes(arguments.model))
    check_nothing_is_left(code, family)


def wait_until_ready(up: "subprocess.Popen[bytes]", ready_file: Path) -> str:
    """The router's address."""
    deadline = time.monotonic() + READY_LIMIT_S
    while not ready_file.exists():
        if up.poll() is not None:
            sys.exit(up.returncode or 1)
        if time.monotonic() > deadline:
            sys.exit(f"not ready within {READY_LIMIT_S:.0f} s")
        time.sleep(0.1)  # a file has nobody to wake us
    return str(json.loads(ready_file.read_text(encoding="utf-8"))["grpc"])


def ask(address: str, question: str) -> dict[str, Any]:
    """The answer as `pdserve generate --json` prints it."""
    command = [*CLI, "generate", question, "--chat", "--json", "--max-tokens", "64", "--address", address]
    answer: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return answer


def token_bytes(model: str) -> int:
    """KV bytes of one token in bfloat16: a key and a value per layer and KV head."""
    config = read_config(resolve(model).folder)
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def show(question: str, answer: dict[str, Any], kv_bytes: int) -> None:
    """The answer, its times, and the path that it took; the bytes over the link must be the prompt's KV."""
    workers, usage, timings = answer["workers"], answer["usage"], answer["timings"]
    prompt, pages = usage["prompt_tokens"], -(-usage["prompt_tokens"] // PAGE_TOKENS)
    expected = kv_bytes * pages * PAGE_TOKENS
    print(f"\n> {question}\n{answer['text']}\n")
    print(f"TTFT      {timings['ttft_ms']:.0f} ms, then {timings['tpot_ms']:.1f} ms per token (TPOT)")
    print(f"prefill   {workers['prefill']}, pid {workers['prefill_pid']}: {usage['prefill_tokens_computed']} tokens")
    print(f"link      {workers['transfer_bytes']:,} bytes of KV pushed")
    print(f"          {expected:,} = {kv_bytes:,} per token x {prompt} tokens, as {pages} pages of {PAGE_TOKENS}")
    print(f"decode    {workers['decode']}, pid {workers['decode_pid']}: {usage['decode_steps']} steps", flush=True)
    if workers["transfer_bytes"] != expected or workers["prefill_pid"] == workers["decode_pid"]:
        sys.exit("that is not the path of a prompt whose KV was handed over")


def stop(up: "subprocess.Popen[bytes]") -> int:
    """Ask the cluster to end, and wait for it."""
    if up.poll() is None:
        up.send_signal(signal.SIGTERM)
    return up.wait(STOP_LIMIT_S)


def check_nothing_is_left(code: int, family: list[psutil.Process]) -> None:
    """Exit with 1 unless the cluster ended well and took all its processes with it."""
    left = [process.pid for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    if code or left:
        sys.exit(f"`pdserve up` ended with exit code {code} and left the processes {left}")
    print(f"\nall {len(family)} processes of the cluster have ended")


if __name__ == "__main__":
    main()
