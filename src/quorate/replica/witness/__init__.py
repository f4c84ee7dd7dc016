"""The witness: checks that shards leave parameters alone, and agree when repeated."""
