"""The committed stubs are what `make proto` writes, byte for byte."""

from pathlib import Path

from scripts.gen_proto import ROOT, generate, stubs_of


def test_committed_stubs_equal_the_generated_ones(tmp_path: Path) -> None:
    stale = [str(stub) for stub in generate(tmp_path) if not same_bytes(ROOT / stub, tmp_path / stub)]
    assert stale == [], "run `make proto` and commit the result"


def test_no_stub_outlives_its_proto_file() -> None:
    protos = (ROOT / "proto").rglob("*.proto")
    wanted = {ROOT / stub for proto in protos for stub in stubs_of(proto.relative_to(ROOT / "proto"))}
    committed = {stub for suffix in ("py", "pyi") for stub in (ROOT / "pdserve").rglob(f"*_pb2*.{suffix}")}
    assert committed == wanted


def same_bytes(committed: Path, generated: Path) -> bool:
    return committed.exists() and committed.read_bytes() == generated.read_bytes()
