"""What people write: job file, pool file, daily windows, the trigger form; and their parser."""
