"""What `up` decides before it starts anything, and what it refuses."""

import socket
from pathlib import Path

import pytest

from cluster import model_store
from cluster.plan import Plan, make_plan, worker_nodes
from pdserve.config import ClusterConfig, resolve
from pdserve.errors import ConfigError


def plan(**settings: object) -> Plan:
    return Plan(resolve(ClusterConfig(**settings), num_gpus=0), Path("/model"))  # type: ignore[arg-type]


def cores(made: Plan, allowed: list[int]) -> dict[str, tuple[int, ...]]:
    return {node.worker_id: node.cores for node in worker_nodes(made, allowed)}


def test_each_worker_gets_a_core_of_those_allowed() -> None:
    assert cores(plan(prefill=2), [3, 5, 8, 9]) == {"prefill-0": (3,), "prefill-1": (5,), "decode-0": (8,)}
    assert cores(plan(threads=2), [3, 5, 8, 9]) == {"prefill-0": (3, 5), "decode-0": (8, 9)}


@pytest.mark.parametrize("settings", [{"prefill": 2, "decode": 3}, {"pin_cores": False}, {"threads": 3}])
def test_nobody_is_pinned_where_cores_are_short_or_it_is_not_wanted(settings: dict[str, object]) -> None:
    assert set(cores(plan(**settings), [0, 1, 2, 3]).values()) == {()}


def test_the_router_is_reached_where_it_listens() -> None:
    assert plan(host="127.0.0.1", grpc_port=7).address == "127.0.0.1:7"
    assert plan(host="0.0.0.0", grpc_port=7).address == "127.0.0.1:7"


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"grpc_port: cannot listen on 127.0.0.1:{port}: Address already in use"):
            make_plan(ClusterConfig(grpc_port=port), print)


def test_an_embedded_redis_is_for_this_machine_only() -> None:
    with pytest.raises(ConfigError, match=r"redis_url: the embedded Redis serves this machine only; with host 0.0.0.0"):
        make_plan(ClusterConfig(host="0.0.0.0"), print)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://h:1", "nowhere", "127.0.0.1:99999"])
def test_a_ray_that_is_not_there_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match=f"ray_address: .*{address}"):
        make_plan(ClusterConfig(ray_address=address), print)


def test_a_bad_model_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make_plan(ClusterConfig(model=str(tmp_path)), print)


def test_the_name_given_wins_over_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = model_store.ResolvedModel(tmp_path, "theirs")
    monkeypatch.setattr(model_store, "resolve", lambda model, progress: found)
    assert make_plan(ClusterConfig(), print).config.name == "theirs"
    assert make_plan(ClusterConfig(name="mine"), print).config.name == "mine"
    assert make_plan(ClusterConfig(), print).config.grpc_port > 0
