"""What every task reads: images, folders, archives and shards; the order of samples; worker processes."""
