"""The ``quorate`` command: one module or folder per subcommand."""
