"""The first layers of a real model: its shapes and its weights for a fraction of the price.

Whether bits depend on batch or chunking is decided within a layer and in the lm_head; more layers of the same shape
say the same again. What must hold for the whole model is tested with the whole model elsewhere.
"""

import json
import re
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_short_model(whole: Path, folder: Path, num_layers: int) -> Path:
    """A folder that serves like `whole`, with its first `num_layers`. Returns the folder."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(whole / name)
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    with safe_open(whole / "model.safetensors", framework="pt") as weights:
        kept = [name for name in weights.keys() if _layer_of(name) < num_layers]  # noqa: SIM118 - no mapping
        save_file({name: weights.get_tensor(name) for name in kept}, folder / "model.safetensors")
    return folder


def _layer_of(name: str) -> int:
    """-1 for what belongs to no layer."""
    match = _LAYER.match(name)
    return int(match[1]) if match else -1
