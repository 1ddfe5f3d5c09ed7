"""One model on one device: token ids and pages go in, logits come out. No network, no other process."""
