"""Parts of a cut model that lie on devices other than the host: for stages that are threads."""
