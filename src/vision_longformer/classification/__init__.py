"""Image classification: train, evaluate and predict, as the commands of the same names do."""
