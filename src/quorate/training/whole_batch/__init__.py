"""Steps of a loss over the whole batch: representations of all shards, the loss, gradients back."""
