"""One file per model family: from the keys of its config.json to a `ModelConfig`."""
