"""Workers of this process: towers with a thread each, or a single tower in the calling thread."""
