"""The ``quorate`` command: a module or folder per subcommand."""
