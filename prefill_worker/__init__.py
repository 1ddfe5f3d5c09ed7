"""Prompt to KV cache and first token: computes prompts in chunks and pushes the pages to the decode worker."""
