"""What is measured with PyTorch: memory, throughput, tokens."""
