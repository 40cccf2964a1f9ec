"""The fastest implementation in PyTorch alone: strips of chunk rows, a few tiles at a time."""
