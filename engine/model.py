"""A whole model: token ids to hidden rows, through the layers, to logits.

It holds the weights and nothing else: no pages, no requests, no state between two forwards. `Runner` drives it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.attention import Look
from engine.batch import Batch
from engine.joined import JoinedLayer, JoinedPass, joined
from engine.kernels import Kernels
from engine.kv_cache import KvCache
from engine.layers import (
    DecoderLayer,
    ExpertMlp,
    GatedMlp,
    HeadNorm,
    Heads,
    Layer,
    LmHead,
    Mlp,
    RmsNorm,
    SelfAttention,
)
from engine.linear import Linear
from engine.model_config import Experts, LayerConfig, MlpNames, ModelConfig
from engine.rotary import rotary_tables
from engine.tensor_names import ATTENTION_OUT, EMBEDDING, FINAL_NORM, HEAD_NORMS, LM_HEAD, layer_prefix
from engine.weights import Weights


class Model:
    """Weights in `dtype` on `device`; activations are fp32 on a CPU and `dtype` on CUDA."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        build = _Builder(config, weights, kernels, dtype, device)
        self._activations = torch.float32 if device.type == "cpu" else dtype
        self._embedding = build.tensor(EMBEDDING)  # [vocab, hidden]
        self.layers = tuple(build.layers())
        joined_ones = [layer for layer in self.layers if isinstance(layer, JoinedLayer)]
        self._joined = joined_ones if len(joined_ones) == len(self.layers) else []
        self._norm = build.norm(FINAL_NORM)
        head = self._embedding if config.tie_embeddings else build.tensor(LM_HEAD)
        self._lm_head = LmHead(head, kernels.head, config.logit_cap)

    def embed(self, batch: Batch) -> Tensor:
        """The hidden rows that the first layer takes, [T, hidden]."""
        rows = self._embedding[batch.token_ids].to(self._activations)
        return rows if self.config.embedding_scale == 1 else rows * self.config.embedding_scale

    def over(self, batch: Batch, cache: KvCache) -> Callable[[int, Tensor], Tensor]:
        """A layer by its index, for the rows of this batch: hidden rows [T, hidden] to the same."""
        if self._joined:
            return JoinedPass(self._joined, batch, cache)
        return lambda index, hidden: self.layers[index](hidden, batch, cache)

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """fp32 [R, vocab] for the sampled rows of what the last layer gave."""
        if not batch.sampled_rows.numel():  # a chunk in the middle of a prompt
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self.head(hidden[batch.sampled_rows])

    def head(self, hidden: Tensor) -> Tensor:
        """fp32 [R, vocab] for any rows of what the last layer gave."""
        return self._lm_head(self._norm(hidden))


class _Builder:
    """Takes tensors by name, brings them to the device, and makes layers of them."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        ropes = {layer.rope for layer in config.layers}
        self._rotary = {rope: rotary_tables(rope, config.window, device) for rope in ropes}

    def tensor(self, *names: str) -> Tensor:
        """One tensor, or several one above the other; a copy, as the weights may be mapped from a file."""
        return torch.cat([self._weights[name].to(self._device, self._dtype) for name in names])

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._norm_weight(name), self._config.rms_eps, self._kernels)

    def layers(self) -> Iterator[Layer]:
        for index, layer in enumerate(self._config.layers):
            yield joined(self._layer(index, layer), self._kernels)

    def _layer(self, index: int, layer: LayerConfig) -> DecoderLayer:
        names, prefix = self._config.names, layer_prefix(index)
        return DecoderLayer(
            self.norm(prefix + names.attention_norm),
            self._attention(index, layer, prefix),
            self._norm_or_none(prefix, names.attention_end_norm),
            self.norm(prefix + names.mlp_norm),
            self._mlp(prefix, names.mlp) if layer.experts is None else self._experts(prefix, layer.experts),
            self._norm_or_none(prefix, names.mlp_end_norm),
        )

    def _norm_weight(self, name: str) -> Tensor:
        return self._weights[f"{name}.weight"].to(self._device, torch.float32, copy=True) + self._config.norm_offset

    def _norm_or_none(self, prefix: str, name: str | None) -> RmsNorm | None:
        return None if name is None else self.norm(prefix + name)

    def _attention(self, index: int, layer: LayerConfig, prefix: str) -> SelfAttention:
        config = self._config
        return SelfAttention(
            index=index,
            heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
            qkv=self._linear(*(prefix + name for name in config.names.qkv), with_bias=config.qkv_bias),
            norm=self._head_norm(prefix) if config.qk_norm else None,
            rotary=self._rotary[layer.rope],
            look=Look(config.attention_scale, layer.reach),
            out=self._linear(prefix + ATTENTION_OUT),
            kernels=self._kernels,
        )

    def _head_norm(self, prefix: str) -> HeadNorm:
        counts = (self._config.num_heads, self._config.num_kv_heads)
        weights = [
            self._norm_weight(prefix + name).expand(count, -1) for name, count in zip(HEAD_NORMS, counts, strict=True)
        ]
        return HeadNorm(torch.cat(weights), self._config.rms_eps, self._kernels)

    def _mlp(self, prefix: str, names: MlpNames) -> GatedMlp:
        gate_mul = self._kernels.gelu_mul if self._config.activation == "gelu" else self._kernels.silu_mul
        gate_up = self._linear(*(prefix + name for name in names.gate_up))
        return GatedMlp(gate_up, gate_mul, self._linear(prefix + names.down))

    def _experts(self, prefix: str, experts: Experts) -> Mlp:
        names = self._config.names
        parts = tuple(self._mlp(prefix, names.experts.of_expert(index)) for index in range(experts.count))
        router = self._kernels.head(self.tensor(f"{prefix}{names.router}.weight"))
        return ExpertMlp(router, parts, experts.per_token, experts.normalized)

    def _linear(self, *names: str, with_bias: bool = False) -> Linear:
        weight = self.tensor(*(f"{name}.weight" for name in names))
        return self._kernels.linear(weight, self.tensor(*(f"{name}.bias" for name in names)) if with_bias else None)
