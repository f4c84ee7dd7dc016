"""What is done around every shard, by the shortest way that torch has."""
