"""A package with the interface of Liger that loopwright uses, in plain PyTorch: for tests without Triton."""
