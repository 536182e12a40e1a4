"""Training on AWS Trainium with the whole Trainer API; on every other device with the same script."""
