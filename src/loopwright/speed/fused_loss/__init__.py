"""Cross-entropy from hidden states, without the full logits."""
