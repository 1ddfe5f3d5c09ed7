"""The flags of the commands, one dataclass per command: the fields are the flags, `flags_of` makes them a signature."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

T = TypeVar("T")
NOT_SETTINGS = ("config", "ready_file")
DEFAULT_ADDRESS = "127.0.0.1:50051"
Address = Annotated[str, typer.Option(envvar="PDSERVE_ADDRESS", help="host:port of a router.")]
WorkerName = Annotated[str, typer.Argument(help="As `pdserve status` names it.")]


@dataclass(frozen=True)
class UpFlags:
    """Of `pdserve up`; None leaves a setting to cluster.yaml, and then to its default."""

    model: Annotated[str | None, typer.Option(help="A folder, a .gguf file or a Hub id; default smollm2.")] = None
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; default 1.")] = None
    decode: Annotated[int | None, typer.Option(help="Decode workers; default 1.")] = None
    config: Annotated[Path | None, typer.Option(help="cluster.yaml; flags win over it.")] = None
    host: Annotated[str | None, typer.Option(help="What servers bind to; default 127.0.0.1.")] = None
    grpc_port: Annotated[int | None, typer.Option(help="The router's port; default a free one.")] = None
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (default) or float32.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto (default).")] = None
    fast: Annotated[
        bool | None, typer.Option("--fast", help="Use bf16 units where the CPU has them; no path-invariance there.")
    ] = None
    threads: Annotated[int | None, typer.Option(help="Of each worker's engine; default 1.")] = None
    redis_url: Annotated[str | None, typer.Option(help="Your Redis; default an embedded one.")] = None
    ray_address: Annotated[str | None, typer.Option(help="A Ray to join; default one of our own.")] = None
    verify_kv: Annotated[
        bool | None, typer.Option("--verify-kv", help="A checksum per KV payload, checked on arrival.")
    ] = None
    chaos: Annotated[bool | None, typer.Option("--chaos", help="Obey `pdserve chaos`: for tests.")] = None
    run_dir: Annotated[str | None, typer.Option(help="Where logs are kept; default nowhere.")] = None
    ready_file: Annotated[Path | None, typer.Option(help="Gets {grpc, redis, pid} as JSON when ready.")] = None

    def settings(self) -> dict[str, Any]:
        """The fields that are keys of cluster.yaml, too."""
        return {key: value for key, value in asdict(self).items() if key not in NOT_SETTINGS}


@dataclass(frozen=True)
class RouterFlags:
    """Where the router is, and how to print what it says."""

    address: Address = DEFAULT_ADDRESS
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


@dataclass(frozen=True)
class DoctorFlags:
    """Of `pdserve doctor`. What is None is decided as `pdserve up` does, or measured."""

    model: Annotated[str | None, typer.Argument(help="As `up` takes it, or a folder with a config.json alone.")] = None
    address: Annotated[str | None, typer.Option(help="host:port of a router: also look at what runs there.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of the requests that are to fit.")] = 256
    completion_tokens: Annotated[int, typer.Option(min=2, help="Likewise.")] = 128
    read_gb_s: Annotated[
        float | None, typer.Option(min=1e-3, help="10^9 bytes/s of memory, as a data sheet has it; else measured.")
    ] = None
    tflops: Annotated[
        float | None, typer.Option(min=1e-6, help="10^12 FLOP/s, dense, in the model's dtype; else measured.")
    ] = None
    memory_gb: Annotated[
        float | None, typer.Option(min=1e-3, help="10^9 bytes for weights and KV pages, all of it; else as `up`.")
    ] = None
    config: Annotated[Path | None, typer.Option(help="cluster.yaml; flags win over it.")] = None
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (default) or float32.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto (default).")] = None
    threads: Annotated[int | None, typer.Option(help="Of each worker's engine; default 1.")] = None
    fast: Annotated[bool | None, typer.Option("--fast", help="Measure the kernels of `up --fast`.")] = None
    decode: Annotated[int | None, typer.Option(help="Decode workers; default 1.")] = None
    num_pages: Annotated[int | None, typer.Option(help="KV pages of each; default as `up`.")] = None

    def settings(self) -> dict[str, Any]:
        """The fields that are keys of cluster.yaml, too."""
        names = ("model", "dtype", "device", "threads", "fast", "decode", "num_pages")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class AuditFlags:
    """Of `pdserve kv audit`."""

    address: Annotated[
        list[str] | None,
        typer.Option(envvar="PDSERVE_ADDRESS", help=f"host:port of every router; default {DEFAULT_ADDRESS}."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


@dataclass(frozen=True)
class DrainFlags:
    """Of `pdserve drain`."""

    worker: WorkerName
    limit_s: Annotated[float, typer.Option(min=0, help="For running requests to finish; then they move.")] = 30.0
    force: Annotated[bool, typer.Option("--force", help="Also the last worker of its role.")] = False
    address: Address = DEFAULT_ADDRESS


class Harm(Enum):
    """What `pdserve chaos` does to a worker."""

    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    SLOW = "slow"


@dataclass(frozen=True)
class ChaosFlags:
    """Of `pdserve chaos`."""

    harm: Annotated[Harm, typer.Argument(help="SIGKILL; SIGSTOP for a time; break its links; slow them for a time.")]
    worker: WorkerName
    for_s: Annotated[float, typer.Option(help="Of stop and slow: seconds until it ends.")] = 3.0
    bytes_per_s: Annotated[float, typer.Option(help="Of slow: what its links may send.")] = 1e6
    address: Address = DEFAULT_ADDRESS


@dataclass(frozen=True)
class GenerateFlags:
    """Of `pdserve generate`; None leaves a field of the request unset."""

    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")]
    address: Address = DEFAULT_ADDRESS
    model: Annotated[str, typer.Option(help="Default: the only one served.")] = ""
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False
    max_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 256
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest.")] = None
    top_p: Annotated[float | None, typer.Option(help="Sample from this much probability.")] = None
    min_p: Annotated[float | None, typer.Option(help="Sample from tokens so likely, against the likeliest.")] = None
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens; default a drawn one.")] = None
    n: Annotated[int | None, typer.Option(help="Answers to the one prompt, 1 to 64; greedy ones are alike.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Divides logits of tokens that were there.")] = None
    presence_penalty: Annotated[float | None, typer.Option(help="Taken off for tokens of the answer so far.")] = None
    frequency_penalty: Annotated[float | None, typer.Option(help="Likewise, each time the token was there.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None
    min_tokens: Annotated[int | None, typer.Option(help="Tokens at least, as far as ids end an answer.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False
    json_schema: Annotated[str | None, typer.Option(help="The file of a schema to follow; - reads input.")] = None
    regex: Annotated[str | None, typer.Option(help="What the whole answer must match.")] = None
    grammar: Annotated[str | None, typer.Option(help="The file of a grammar in Lark's form; - reads input.")] = None
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Show how likely the token of each step was.")] = False
    top_logprobs: Annotated[int, typer.Option(help="Show the K likeliest of each step, 0 to 20.")] = 0
    timeout: Annotated[float, typer.Option(help="Seconds for the whole answer.")] = 600.0
    resume_for_s: Annotated[float, typer.Option(help="Reconnect so long when the router dies; 0: never.")] = 30.0
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


def flags_of(cls: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Turn a function of one flags object into a command whose options are its fields."""

    def decorate(function: Callable[[T], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(cls(**values))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = cls.__annotations__
        command.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
        return command

    return decorate
