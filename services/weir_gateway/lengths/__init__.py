"""How long answers will be: predicted, calibrated, and logged for training."""
