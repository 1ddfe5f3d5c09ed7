"""A whole model: token ids to hidden rows, through the layers, to logits.

It holds the weights and nothing else: no pages, no requests, no state between two forwards. `Runner` drives it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels import Kernels
from engine.layers import DecoderLayer, GatedMlp, LmHead, RmsNorm, SelfAttention, rotary_tables
from engine.model_config import ModelConfig
from engine.weights import EMBEDDING, LM_HEAD, Weights


class Model:
    """Weights in `dtype` on `device`; activations are fp32 on a CPU and `dtype` on CUDA."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        build = _Builder(config, weights, kernels, dtype, device)
        self._activations = build.activations
        self._embedding = build.tensor(EMBEDDING)  # [vocab, hidden]
        self.layers = tuple(build.layers())
        self._norm = build.norm("model.norm")
        head = self._embedding if config.tie_embeddings else build.tensor(LM_HEAD)
        self._lm_head = LmHead(head, kernels)

    def embed(self, batch: Batch) -> Tensor:
        """The hidden rows that the first layer takes, [T, hidden]."""
        return self._embedding[batch.token_ids].to(self._activations)

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
        self.activations = torch.float32 if device.type == "cpu" else dtype
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._rotary = rotary_tables(config, device)

    def tensor(self, *names: str) -> Tensor:
        """One tensor, or several one above the other; a copy, as the weights may be mapped from a file."""
        return torch.cat([self._weights[name].to(self._device, self._dtype) for name in names])

    def norm(self, name: str) -> RmsNorm:
        weight = self._weights[f"{name}.weight"].to(self._device, self.activations, copy=True)
        return RmsNorm(weight, self._config.rms_eps, self._kernels)

    def layers(self) -> Iterator[DecoderLayer]:
        for index in range(self._config.num_layers):
            prefix = f"model.layers.{index}"
            yield DecoderLayer(
                self.norm(f"{prefix}.input_layernorm"),
                self._attention(index, f"{prefix}.self_attn"),
                self.norm(f"{prefix}.post_attention_layernorm"),
                self._mlp(f"{prefix}.mlp"),
            )

    def _attention(self, index: int, prefix: str) -> SelfAttention:
        qkv = self._kernels.linear(self.tensor(*(f"{prefix}.{part}_proj.weight" for part in "qkv")))
        out = self._kernels.linear(self.tensor(f"{prefix}.o_proj.weight"))
        return SelfAttention(index, qkv, out, self._config, self._rotary, self._kernels)

    def _mlp(self, prefix: str) -> GatedMlp:
        gate_up = self._kernels.linear(self.tensor(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"))
        return GatedMlp(gate_up, self._kernels.linear(self.tensor(f"{prefix}.down_proj.weight")), self._kernels)
