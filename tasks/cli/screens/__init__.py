"""What the command line shows a person."""
