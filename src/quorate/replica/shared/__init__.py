"""What the threads of a process share: found, and kept out of a shard, which is computed alone."""
