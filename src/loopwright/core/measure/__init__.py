"""What is measured during training: loss, throughput, time and memory."""
