"""The subcommands of ``hal``, one module each."""
