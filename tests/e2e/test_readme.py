"""What the README and the example tell a reader to type does work."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.harness import READY_LIMIT_S, ROOT, free_port, stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def commands() -> list[list[str]]:
    """The lines of the README's console blocks that call pdserve, on a free port."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    port = str(free_port())
    lines = [line.replace("8000", port) for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("pdserve ")]


def test_the_commands_of_the_readme(smollm2_folder: Path, tmp_path: Path) -> None:
    up, *others = commands()
    assert up[1] == "up"
    drain, audit, chaos, doctor = (each for each in others if each[1] in {"drain", "kv", "chaos", "doctor"})
    others = [command for command in others if command[1] in {"generate", "status"}]
    assert len(others) == 4
    pdserve, ready = [sys.executable, "-m", "cluster.cli"], tmp_path / "ready.json"
    process = subprocess.Popen([*pdserve, *up[1:], "--ready-file", str(ready)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_LIMIT_S
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        outputs = [subprocess.check_output([*pdserve, *each[1:]], cwd=ROOT, timeout=60, text=True) for each in others]
        for command in (audit, doctor):
            assert subprocess.check_output([*pdserve, *command[1:]], cwd=ROOT, timeout=60, text=True).strip()
        for command, why in ((drain, "'decode-1' is not there"), (chaos, "was not started with --chaos")):
            refused = subprocess.run([*pdserve, *command[1:]], cwd=ROOT, timeout=60, capture_output=True, text=True)
            assert refused.returncode == 2
            assert why in refused.stderr
    finally:
        code = stop(process)
    assert "The capital of France is Paris." in outputs[0]
    assert "█" in outputs[1]
    assert [f"[{index}] seed " in outputs[2] for index in range(3)] == [True] * 3
    assert "decode-0" in outputs[-1]
    assert code == 0


def test_the_example_in_one_process(smollm2_folder: Path) -> None:
    command = [sys.executable, "-m", "examples.one_process", str(smollm2_folder)]
    answer = subprocess.check_output(command, cwd=ROOT, timeout=120, text=True)
    assert answer.strip() == "The capital of France is Paris."
