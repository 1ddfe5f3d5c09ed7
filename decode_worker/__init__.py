"""KV cache and first token to all further tokens: promises room, adopts what is pushed, runs the batched token loop."""
