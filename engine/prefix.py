"""Moved to pdserve.prefix: the router names pages, too."""

from pdserve.prefix import ROOT, page_hash, prompt_hashes

__all__ = ["ROOT", "page_hash", "prompt_hashes"]
