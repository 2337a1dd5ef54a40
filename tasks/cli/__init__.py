"""The command line. `main` first: it lists the commands."""
