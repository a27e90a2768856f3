"""The `penstock` command: one file a subcommand, loaded when it is called."""
