"""What is switched on in a model before training, and what callbacks change in it while it trains."""
