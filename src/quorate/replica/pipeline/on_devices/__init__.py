"""Parts of a cut model on devices beside the host: for stages in threads."""
