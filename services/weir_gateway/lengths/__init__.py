"""Output lengths: predicted, calibrated, and logged for training."""
