"""What people write: the job, the pool, availability windows, the trigger form, and how they are parsed."""
