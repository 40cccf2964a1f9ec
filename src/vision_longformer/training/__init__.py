"""What classification and detection share: settings, optimisation, randomness, the run directory and the loop."""
