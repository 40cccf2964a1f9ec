"""What all tasks share: recipes, optimisation, the loop, checkpoints, callbacks and the run directory."""
