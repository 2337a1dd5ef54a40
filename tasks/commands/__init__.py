"""The commands of the command line, by what they are about; `trainwright.tasks.cli` puts them together."""
