"""State that the threads of a process share: detected, and kept from influencing a shard."""
