"""Configuration: strict about keys, types and ranges; "auto" ends in `resolve`; a node's JSON round trip."""

import dataclasses
from dataclasses import fields
from pathlib import Path

import pytest

from pdserve.config import LIMITS, ClusterConfig, NodeConfig, load_config, resolve
from pdserve.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def node(config: ClusterConfig) -> NodeConfig:
    return NodeConfig(
        role="prefill",
        worker_id="prefill-0",
        namespace="n",
        redis_url="unix:///r.sock",
        model_dir="/m",
        log_dir="/l",
        cores=(0, 3),
        cluster=config,
    )


def test_flags_lie_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: a/b\nprefill: 2\nstuck_after_s: 5\n")
    config = load_config(path, {"prefill": 3, "decode": None})
    assert config == ClusterConfig(model="a/b", prefill=3, stuck_after_s=5.0)


def test_an_empty_file_is_no_configuration(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n"), {"model": "m"}) == ClusterConfig(model="m")


def test_an_unknown_key_is_named_with_the_allowed_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.yaml: unknown key 'prefil'; allowed: model, name, prefill, decode"):
        load_config(write(tmp_path, "model: m\nprefil: 2\n"), {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prefill: two", "prefill: expected int, got 'two'"),
        ("prefill: true", "prefill: expected int, got True"),
        ("prefill: 0", r"prefill: 0 is not in \[1, 1024\]"),
        ("fast: 1", "fast: expected bool, got 1"),
        ("dtype: float16", "dtype: 'float16' is not one of auto, bfloat16, float32"),
        ("stuck_after_s: .nan", "stuck_after_s: nan is not in"),
        ("grpc_port: 65536", "grpc_port: 65536 is not in"),
        ("host: null", "host: expected str, got None"),
        ("- model", "expected a mapping of keys, got list"),
        ("a: [", "not YAML"),
        ("5: 6", "unknown key '5'"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, line: str, message: str) -> None:
    prefix = "" if line[0] in "-a5" else "model: m\n"
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(write(tmp_path, prefix + line + "\n"), {})
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_empty_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml", {})
    with pytest.raises(ConfigError, match="model: empty"):
        load_config(None, {"model": ""})


def test_resolve_leaves_no_auto() -> None:
    resolved = resolve(ClusterConfig(model="models/toy.gguf"), num_gpus=0)
    assert "auto" not in dataclasses.asdict(resolved).values()
    assert (resolved.device, resolved.backend, resolved.dtype, resolved.threads) == ("cpu", "gloo", "bfloat16", 1)
    assert resolve(resolved, num_gpus=0) == resolved


def test_resolve_takes_nccl_only_with_a_gpu_per_worker() -> None:
    one = resolve(ClusterConfig(model="m"), num_gpus=1)
    assert (one.device, one.backend) == ("cuda", "gloo")
    assert resolve(ClusterConfig(model="m"), num_gpus=2).backend == "nccl"
    with pytest.raises(ConfigError, match="nccl needs a GPU per worker, 2; found 1"):
        resolve(ClusterConfig(model="m", backend="nccl"), num_gpus=1)
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        resolve(ClusterConfig(model="m", device="cuda"), num_gpus=0)


def test_a_node_configuration_crosses_as_json() -> None:
    original = node(ClusterConfig(model="m", fast=True))
    assert NodeConfig.from_json(original.to_json()) == original
    with pytest.raises(ConfigError, match="cluster: unknown key 'modell'"):
        NodeConfig.from_json(original.to_json().replace('"model"', '"modell"'))
    with pytest.raises(ConfigError, match="node configuration"):
        NodeConfig.from_json("{")


def test_the_configuration_stays_small() -> None:
    names = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert len(names) + len(dataclasses.fields(NodeConfig)) <= 32
    assert set(LIMITS) <= names


def test_the_example_shows_every_setting_with_its_default() -> None:
    path = Path(__file__).parents[3] / "examples" / "cluster.yaml"
    assert load_config(path, {}) == ClusterConfig(model="smollm2")
    keys = {line.partition(":")[0] for line in path.read_text().splitlines() if not line.startswith("#")}
    assert keys == {field.name for field in fields(ClusterConfig)}
